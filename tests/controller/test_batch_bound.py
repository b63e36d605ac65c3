"""The fit of the roofline batch bound, on synthetic rooflines with noise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.controller.batch_bound import UNSEEN, WINDOW, BatchBoundFit, StepLatency, StepSample, fit

SLOWDOWN = 1.2


def samples(seconds_of, sizes, rng, *, each=8, noise=0.0, outliers=0.0, kv_of=lambda size, rng: 0.0):
    """Steps of these batch sizes; noise is relative, outliers take up to ten times as long."""
    result = []
    for size in sizes:
        for _ in range(each):
            kv = kv_of(size, rng)
            seconds = seconds_of(size, kv) * (1 + noise * rng.uniform(-1, 1))
            if rng.random() < outliers:
                seconds *= rng.uniform(2, 10)
            result.append(StepSample(running=int(size), kv_utilization=kv, seconds=seconds))
    rng.shuffle(result)
    return result


def knee(seconds_of, largest):
    """The bound by definition, from the latency without noise."""
    flat = [size for size in range(1, largest + 1) if seconds_of(size, 0.0) <= SLOWDOWN * seconds_of(1, 0.0)]
    return max(flat)


@st.composite
def rooflines(draw):
    """max(reading the weights, computing) + overhead, whose flat part ends at `turn`."""
    flat = draw(st.floats(1e-4, 0.1))
    turn = draw(st.integers(2, 200))
    overhead = draw(st.floats(0, 0.5)) * flat
    return lambda size, kv: max(flat, flat * size / turn) + overhead


@settings(max_examples=60)
@given(rooflines(), st.integers(0, 2**32 - 1), st.floats(0, 0.05), st.floats(0, 0.1))
def test_the_knee_of_a_noisy_roofline_is_found(seconds_of, seed, noise, outliers):
    rng = np.random.default_rng(seed)
    largest = 2 * knee(seconds_of, 400)
    fitted = fit(samples(seconds_of, range(1, largest + 1), rng, noise=noise, outliers=outliers))
    found, true = fitted.bound(SLOWDOWN, 0.0), knee(seconds_of, 400)
    # A latency that is off by `noise` moves the crossing of the line by 1.2 times as much, at either end.
    assert true * (1 - 3 * noise) - 2 <= found <= true * (1 + 3 * noise) + 2


@settings(max_examples=60)
@given(rooflines(), st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_the_order_of_the_samples_does_not_matter_and_f_never_falls(seconds_of, seed, largest):
    rng = np.random.default_rng(seed)
    made = samples(seconds_of, range(1, largest + 1), rng, noise=0.3, outliers=0.3, each=3)
    fitted = fit(made)
    assert np.all(np.diff(fitted.seconds) >= 0) and np.all(np.diff(fitted.sizes) > 0)
    assert 1 <= fitted.bound(SLOWDOWN, 0.0) <= UNSEEN * largest
    again = fit(made[::-1])
    assert again.seconds.tolist() == fitted.seconds.tolist() and again.seconds_per_kv == fitted.seconds_per_kv


@settings(max_examples=40)
@given(st.floats(1e-4, 0.1), st.floats(0.2, 5), st.integers(0, 2**32 - 1), st.floats(0, 0.03))
def test_what_reading_the_kv_cache_costs_is_told_from_what_the_batch_costs(flat, share, seed, noise):
    rng = np.random.default_rng(seed)
    per_kv = share * flat  # of the full cache

    def seconds_of(size, kv):
        return flat * max(1.0, size / 40) + per_kv * kv

    made = samples(
        seconds_of, range(1, 81), rng, noise=noise, kv_of=lambda size, rng: min(1.0, size / 80 * rng.uniform(0.2, 1))
    )
    fitted = fit(made)
    assert fitted.seconds_per_kv == pytest.approx(per_kv, abs=0.05 * per_kv + 6 * noise * flat)
    # The longer the contexts, the fewer trajectories cost no latency.
    bounds = [fitted.bound(SLOWDOWN, kv) for kv in (0.0, 0.005, 0.02, 0.1)]
    assert bounds == sorted(bounds, reverse=True) and bounds[-1] >= 1


def test_a_flat_latency_is_trusted_a_little_beyond_what_was_seen():
    rng = np.random.default_rng(0)
    fitted = fit(samples(lambda size, kv: 0.01, range(1, 9), rng, noise=0.05))
    assert fitted.bound(SLOWDOWN, 0.0) == 16


def test_a_knee_that_was_passed_is_not_trusted_away_by_few_large_batches():
    fitted = StepLatency(sizes=np.array([1.0, 10.0, 20.0]), seconds=np.array([1.0, 1.0, 2.0]), seconds_per_kv=0.0)
    assert fitted.bound(1.2, 0.0) == 12
    assert fitted.bound(3.0, 0.0) == 40
    assert fitted.at(15, 0.5) == 1.5


def test_too_few_samples_give_no_bound():
    assert fit([]) is None
    bound = BatchBoundFit()
    assert bound.latency() is None
    bound.add([StepSample(running=1, kv_utilization=0.0, seconds=0.1)] * 2)
    assert bound.latency() is None
    bound.add(
        [StepSample(running=0, kv_utilization=0.0, seconds=0.1), StepSample(running=1, kv_utilization=0.0, seconds=0)]
    )
    assert bound.latency() is None  # neither is a decode step


def test_the_oldest_samples_are_forgotten():
    bound = BatchBoundFit()
    bound.add(
        StepSample(running=size, kv_utilization=0.0, seconds=0.1 * size) for size in range(1, 9) for _ in range(8)
    )
    assert bound.latency().bound(SLOWDOWN, 0.0) == 1
    flat = [StepSample(running=size, kv_utilization=0.0, seconds=0.1) for size in range(1, 9)]
    bound.add(flat * (WINDOW // 8))
    assert bound.latency().bound(SLOWDOWN, 0.0) == 16

"""B, the roofline batch bound of repack, fitted from the decode steps that rollouts report. Pure: no clock, no channel.

Decoding is bound by memory as long as reading the weights takes longer than computing on a batch: up to B trajectories a step
takes about as long as with one. Above that its latency rises. A step also reads the KV cache, so B is smaller for long
contexts: the model is seconds(N, K) = f(N) + c K, with N trajectories and KV utilization K, where f never falls.

Invariants: no profiling runs, only steps that were made anyway; a fit is the same in whatever order its samples came; nothing
is said about batches more than twice as large as any that was seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 1024  # newest samples that count: a fit takes some 3 ms
MIN_SAMPLES = 3  # of a batch size; sizes with fewer are put together with their neighbours
MIN_SPREAD = 0.02  # of KV utilization between two samples of a batch size, to say what reading it costs
UNSEEN = 2.0  # a batch so many times as large as any seen is trusted where all seen were flat

Floats = NDArray[np.float64]


@dataclass(kw_only=True, slots=True, frozen=True)
class StepSample:
    """Some decode steps of one batch size on one rollout."""

    running: int  # trajectories in the batch, 1 or more
    kv_utilization: float  # mean over the steps, 0 to 1
    seconds: float  # median over the steps


@dataclass(kw_only=True, slots=True, frozen=True)
class StepLatency:
    """f at the batch sizes that were seen, and c."""

    sizes: Floats  # float64 [S], ascending
    seconds: Floats  # float64 [S], ascending: f
    seconds_per_kv: float  # c: for the whole KV cache

    def at(self, running: float, kv_utilization: float) -> float:
        """Seconds of a decode step; constant beyond the sizes that were seen."""
        return float(np.interp(running, self.sizes, self.seconds)) + self.seconds_per_kv * kv_utilization

    def bound(self, slowdown: float, kv_per_trajectory: float) -> int:
        """The largest batch of such trajectories whose step takes at most `slowdown` times that of a single one; 1 or more.

        At most `UNSEEN` times the largest batch that was seen.
        """
        sizes = np.arange(1, int(UNSEEN * self.sizes[-1]) + 1, dtype=np.float64)
        kv = np.minimum(1.0, sizes * kv_per_trajectory)
        seconds = np.interp(sizes, self.sizes, self.seconds) + self.seconds_per_kv * kv
        beyond = np.flatnonzero(seconds > slowdown * seconds[0])
        return int(beyond[0]) if len(beyond) else len(sizes)


class BatchBoundFit:
    """Takes in samples, and fits when asked."""

    def __init__(self) -> None:
        self._samples: deque[StepSample] = deque(maxlen=WINDOW)
        self._fitted: StepLatency | None = None
        self._is_new = False

    def add(self, samples: Iterable[StepSample]) -> None:
        """Take these in; the oldest are forgotten."""
        for sample in samples:
            if sample.running >= 1 and sample.seconds > 0:
                self._samples.append(sample)
                self._is_new = True

    def latency(self) -> StepLatency | None:
        """The model that fits the newest samples; None while there are too few of them."""
        if self._is_new:
            self._fitted = fit(list(self._samples))
            self._is_new = False
        return self._fitted


def fit(samples: list[StepSample]) -> StepLatency | None:
    """Robust against noise of any sign: medians, then the nearest sequence that never falls. None for too few samples."""
    if len(samples) < MIN_SAMPLES:
        return None
    rows = np.array(sorted((one.running, one.kv_utilization, one.seconds) for one in samples))  # float64 [n, 3]
    sizes, kv, seconds = rows[:, 0], rows[:, 1], rows[:, 2]
    slope = _seconds_per_kv(sizes, kv, seconds)
    centres, medians, weights = _by_size(sizes, seconds - slope * kv)
    return StepLatency(sizes=centres, seconds=_isotonic(medians, weights), seconds_per_kv=slope)


def _seconds_per_kv(sizes: Floats, kv: Floats, seconds: Floats) -> float:
    """Weighted median of the slopes between samples of one batch size, by which f drops out; 0 where nothing shows one.

    Sorted by size and KV utilization, each sample of the lower half of a size is paired with one of the upper half.
    """
    slopes, spreads = [], []
    for start, end in _runs(sizes):
        half = (end - start) // 2
        low, high = slice(start, start + half), slice(end - half, end)
        spread = kv[high] - kv[low]
        wide = spread >= MIN_SPREAD
        slopes.append((seconds[high] - seconds[low])[wide] / spread[wide])
        spreads.append(spread[wide])
    slope, weight = np.concatenate(slopes), np.concatenate(spreads)
    if len(slope) < MIN_SAMPLES:
        return 0.0
    return max(0.0, _weighted_median(slope, weight))


def _runs(sizes: Floats) -> list[tuple[int, int]]:
    """[start, end) of equal sizes."""
    starts = np.flatnonzero(np.r_[True, sizes[1:] != sizes[:-1]])
    return list(zip(starts.tolist(), [*starts[1:].tolist(), len(sizes)], strict=True))


def _by_size(sizes: Floats, seconds: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean size, median seconds and number of samples of each batch size, neighbours together where samples are few."""
    centres, medians, weights = [], [], []
    start = 0
    runs = _runs(sizes)
    for number, (_, end) in enumerate(runs):
        left = len(sizes) - end
        if end - start < MIN_SAMPLES or (0 < left < MIN_SAMPLES and number < len(runs) - 1):
            continue
        centres.append(float(np.mean(sizes[start:end])))
        medians.append(float(np.median(seconds[start:end])))
        weights.append(float(end - start))
        start = end
    return np.array(centres), np.array(medians), np.array(weights)


def _isotonic(values: Floats, weights: Floats) -> Floats:
    """The sequence that never falls with the least weighted absolute distance to these: pool adjacent violators.

    By medians rather than means, so that a batch size that only ever met a busy machine does not raise those above it.
    """
    blocks: list[tuple[float, list[tuple[float, float]]]] = []  # median, (value, weight) of its members
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        median, members = value, [(value, weight)]
        while blocks and blocks[-1][0] >= median:
            members = blocks.pop()[1] + members
            median = _weighted_median(*np.array(members).T)
        blocks.append((median, members))
    return np.concatenate([np.full(len(members), median) for median, members in blocks])


def _weighted_median(values: Floats, weights: Floats) -> float:
    """The smallest value that has half of the weight at or below it."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])

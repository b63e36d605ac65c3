from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.simulation.models.hardware import gpu
from laminar.simulation.models.language_models import language_model
from laminar.simulation.models.relay_model import Chain, global_sync_seconds, pull_seconds, relay_chain


@given(st.integers(1, 10**12), st.integers(3, 1000), st.floats(1e-6, 1e-2), st.floats(1e8, 1e12))
def test_best_chunks_are_the_best(nbytes, relays, latency_s, bandwidth):
    chain = Chain(nbytes=nbytes, relays=relays, latency_s=latency_s, bandwidth=bandwidth)
    best = chain.best_chunks
    assert chain.seconds <= chain.arrival_seconds(relays - 1, best + 1)
    assert best == 1 or chain.seconds <= chain.arrival_seconds(relays - 1, best - 1)
    ideal = (math.sqrt(nbytes / bandwidth) + math.sqrt(latency_s * (relays - 2))) ** 2
    assert chain.seconds >= ideal * (1 - 1e-9)


def test_the_last_relay_is_the_latest():
    chain = relay_chain(language_model("Qwen2.5-72B"), 128)
    arrivals = [chain.arrival_seconds(position) for position in range(128)]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals) and arrivals[-1] == chain.seconds


def test_almost_independent_of_the_length():
    model = language_model("Qwen2.5-72B")
    assert relay_chain(model, 128).seconds < 1.1 * relay_chain(model, 2).seconds
    # The paper: less than 1.6 s to 127 relays.
    assert relay_chain(model, 128).seconds == pytest.approx(1.6, rel=0.15)


def test_a_chain_of_one_has_nothing_to_send():
    assert relay_chain(language_model("Qwen2.5-7B"), 1).seconds == 0


def test_pull_is_one_shard_over_one_link():
    assert pull_seconds(language_model("Qwen2.5-72B"), gpu("H800"), 8) == pytest.approx(
        2 * 72_706_203_648 / 8 / (64e9 * 0.85)
    )


def test_a_global_sync_waits_longer_than_a_pull():
    for name, tensor_parallel in (("Qwen2.5-7B", 1), ("Qwen2.5-32B", 4), ("Qwen2.5-72B", 8)):
        model = language_model(name)
        assert global_sync_seconds(model, gpu("H800"), 64) > pull_seconds(model, gpu("H800"), tensor_parallel)
    # One NIC at 45 GB/s, then a pass through memory.
    assert global_sync_seconds(language_model("Qwen2.5-72B"), gpu("H800"), 512) == pytest.approx(
        145.412e9 / 45e9 + 145.412e9 / (3.35e12 * 0.75), rel=1e-3
    )

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.simulation.models.hardware import CONSTANTS, gpu
from laminar.simulation.models.language_models import language_model
from laminar.simulation.models.step_time import StepCosts

MODEL, H800 = language_model("Qwen2.5-72B"), gpu("H800")


def step_seconds(running, kv_tokens, tensor_parallel):
    """One step, straight from the formulas of docs/simulation-models.md."""
    c = CONSTANTS
    memory = (MODEL.read_bytes + MODEL.replica_kv_bytes_per_token(tensor_parallel) * kv_tokens) / (
        tensor_parallel * H800.memory_bandwidth * c.decode_bandwidth_share
    )
    compute = (2 * MODEL.multiplied_parameters * running + MODEL.attention_flops * kv_tokens) / (
        tensor_parallel * H800.peak_flops * c.prefill_flops_share
    )
    overhead = c.step_overhead_s
    if tensor_parallel > 1:
        sent = 2 * (tensor_parallel - 1) / tensor_parallel * running * MODEL.hidden * 2
        link = H800.nvlink_bandwidth / 2 * c.all_reduce_bandwidth_share
        overhead += 2 * MODEL.layers * (c.all_reduce_latency_s + sent / link)
    return max(memory, compute) + overhead


@settings(max_examples=200)
@given(running=st.integers(1, 2000), context=st.integers(1, 20_000), tensor_parallel=st.sampled_from([1, 2, 4, 8, 16]))
def test_closed_form_is_the_sum_of_single_steps(running, context, tensor_parallel):
    costs = StepCosts(MODEL, H800, tensor_parallel, CONSTANTS)
    kv_tokens = running * context
    steps = costs.steps(running, kv_tokens)
    single = [step_seconds(running, kv_tokens + running * i, tensor_parallel) for i in range(300)]
    used = [1000 + 7 * i for i in range(300)]
    for n in (0, 1, 2, 150, 299):
        assert steps.seconds(n) == pytest.approx(math.fsum(single[:n]), rel=1e-9)
        expected = math.fsum(s * u for s, u in zip(single[:n], used, strict=False))
        assert steps.integral(n, 1000, 7) == pytest.approx(expected, rel=1e-9)


def test_a_batch_that_turns_from_compute_to_memory():
    """With 400 running the FLOPs count first; as the KV cache grows, its bytes do."""
    costs = StepCosts(MODEL, H800, 8, CONSTANTS)
    steps = costs.steps(400, 400)
    increments = [steps.seconds(n + 1) - steps.seconds(n) for n in (0, 10, 5000)]
    assert increments == pytest.approx([step_seconds(400, 400 * (n + 1), 8) for n in (0, 10, 5000)], rel=1e-6)
    slow, fast = increments[1] - increments[0], (increments[2] - increments[1]) / 499
    assert fast > 5 * slow > 0


@settings(max_examples=300)
@given(
    running=st.integers(1, 2000), context=st.integers(1, 20_000), n=st.integers(0, 10**6), part=st.floats(0.001, 0.999)
)
def test_whole_steps_inverts_seconds(running, context, n, part):
    steps = StepCosts(MODEL, H800, 8, CONSTANTS).steps(running, running * context)
    at, after = steps.seconds(n), steps.seconds(n + 1)
    assert steps.whole_steps(at) == n == steps.steps_to_reach(at)
    middle = at + part * (after - at)
    assert steps.whole_steps(middle) == n
    assert steps.steps_to_reach(middle) == n + 1


def test_nothing_happens_before_the_start():
    steps = StepCosts(MODEL, H800, 8, CONSTANTS).steps(3, 100)
    assert steps.whole_steps(-1.0) == steps.steps_to_reach(-1.0) == steps.steps_to_reach(0.0) == 0


def test_prefill_is_the_same_in_two_pieces():
    costs = StepCosts(MODEL, H800, 8, CONSTANTS)
    assert costs.prefill_seconds(3000, 0) == pytest.approx(
        costs.prefill_seconds(1000, 0) + costs.prefill_seconds(2000, 1000)
    )

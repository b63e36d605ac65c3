from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from laminar.errors import UserError
from laminar.simulation.models.lengths import Growth, LogNormalLengths
from laminar.simulation.models.workload import BLOCK, CACHED_BLOCKS, ToolCalls, Workload

LENGTHS = LogNormalLengths(median=1500, p99=12_000, maximum=16_384)
TOOLS = ToolCalls(minimum=1, maximum=4, latency_median_s=0.5, latency_p99_s=60, latency_limit_s=90)


def workload(**changes):
    values = {
        "lengths": LENGTHS,
        "prompt_lengths": LogNormalLengths(median=300, p99=1500, maximum=2048),
        "group_size": 4,
        "groups_per_step": 8,
        "seed": 3,
        "tools": TOOLS,
    }
    return Workload(**values | changes)


def everything(source, prompt_id):
    members = range(source.group_size)
    return (
        source.prompt_tokens(prompt_id),
        [source.response_tokens(prompt_id, member) for member in members],
        [source.was_cut(prompt_id, member) for member in members],
        [source.pauses(prompt_id, member) for member in members],
    )


def test_the_answer_does_not_depend_on_the_order_of_asking():
    prompts = [0, 1, BLOCK - 1, BLOCK, 5 * BLOCK + 7, 1_000_000]
    forwards, backwards = workload(), workload()
    first = {prompt_id: everything(forwards, prompt_id) for prompt_id in prompts}
    assert {prompt_id: everything(backwards, prompt_id) for prompt_id in reversed(prompts)} == first
    for block in range(CACHED_BLOCKS + 2):  # the first blocks are forgotten, and drawn again
        forwards.prompt_tokens(block * BLOCK)
    assert {prompt_id: everything(forwards, prompt_id) for prompt_id in prompts} == first


def test_the_answer_is_the_same_in_another_process():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_workload import everything, workload; "
        "print([everything(workload(), i) for i in (0, 513)])"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code, os.path.dirname(__file__)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert answers == {str([everything(workload(), prompt_id) for prompt_id in (0, 513)]) + "\n"}


def test_seeds_and_prompts_and_members_differ():
    one, other = workload(), workload(seed=4)
    assert everything(one, 0) != everything(other, 0)
    assert everything(one, 0) != everything(one, 1) != everything(one, BLOCK)
    assert len(set(everything(one, 0)[1])) > 1


def test_responses_do_not_depend_on_prompt_lengths_or_tools():
    fixed = workload(prompt_lengths=1000, tools=None)
    assert fixed.prompt_tokens(77) == fixed.max_prompt_tokens == 1000
    assert everything(fixed, 77)[1] == everything(workload(), 77)[1]
    assert fixed.pauses(77, 0) == ()


def test_cut_responses_are_those_at_the_maximum():
    source = workload(lengths=LogNormalLengths(median=1500, p99=12_000, maximum=3000))
    pairs = [(source.response_tokens(i, m), source.was_cut(i, m)) for i in range(200) for m in range(4)]
    assert all(tokens == 3000 for tokens, was_cut in pairs if was_cut)
    assert 0.1 < np.mean([was_cut for _, was_cut in pairs]) < 0.4


def test_pauses_lie_within_the_response_in_order():
    source = workload(lengths=LogNormalLengths(median=5, p99=100, maximum=500))
    calls, seconds = set(), []
    for prompt_id in range(300):
        for member in range(4):
            pauses = source.pauses(prompt_id, member)
            after = [tokens for tokens, _ in pauses]
            assert after == sorted(set(after))
            assert all(0 < tokens < source.response_tokens(prompt_id, member) for tokens in after)
            calls.add(len(pauses))
            seconds += [latency for _, latency in pauses]
    assert calls == {0, 1, 2, 3, 4}  # none where a response has one token
    assert np.median(seconds) == pytest.approx(0.5, rel=0.15)
    assert max(seconds) == 90


def test_group_correlation_is_the_share_of_variance_between_prompts():
    def between(correlation):
        source = workload(
            group_correlation=correlation, lengths=LogNormalLengths(median=1500, p99=12_000, maximum=10**7)
        )
        logs = np.log([[source.response_tokens(i, m) for m in range(4)] for i in range(4000)])
        return np.cov(logs[:, 0], logs[:, 1])[0, 1] / logs.var()

    assert between(0.0) == pytest.approx(0, abs=0.05)
    assert between(0.6) == pytest.approx(0.6, abs=0.05)
    whole = workload(group_correlation=1.0)
    assert len(set(everything(whole, 9)[1])) == 1


def test_lengths_grow_by_the_step():
    plain, grown = workload(), workload(growth=Growth(per_step=0.5))
    for prompt_id, factor in ((0, 1), (7, 1), (8, 1.5), (16, 2), (BLOCK, 1 + 0.5 * BLOCK / 8)):
        expected = min(16_384, plain.response_tokens(prompt_id, 1) * factor)
        assert grown.response_tokens(prompt_id, 1) == pytest.approx(expected, abs=factor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 0}, "workload.group_size: 0"),
        ({"groups_per_step": 0}, "workload.groups_per_step: 0"),
        ({"seed": -1}, "workload.seed: -1"),
        ({"group_correlation": 1.5}, "workload.group_correlation: 1.5"),
        ({"prompt_lengths": 0}, "workload.prompt_lengths: 0"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        workload(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minimum": 5}, "minimum 5, maximum 4"),
        ({"latency_median_s": 0}, "latency_median_s 0"),
        ({"latency_p99_s": 0.1}, "latency_p99_s 0.1"),
        ({"latency_limit_s": 0}, "tools.latency_limit_s: 0"),
    ],
)
def test_bad_tools_are_refused(changes, message):
    values = {"minimum": 1, "maximum": 4, "latency_median_s": 0.5, "latency_p99_s": 60, "latency_limit_s": 90}
    with pytest.raises(UserError, match=message):
        ToolCalls(**values | changes)

"""pass@k against counting, and the figures of an evaluation."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.evaluation_result import EvaluatedResponse, pass_at_k, reported_ks, summarize
from laminar.observability.evaluation_text import evaluation_rows


def response(prompt_id, sample, reward, **changes):
    values = {
        "evaluation": 1,
        "policy_version": 3,
        "prompt_id": prompt_id,
        "sample": sample,
        "source": "held-out",
        "prompt": "",
        "answer": "",
        "response": "",
        "response_tokens": 10,
        "finish_reason": "stop",
        "reward": reward,
        "reward_parts": {},
        "error": "" if reward is not None else "the reward failed",
    }
    return EvaluatedResponse(**{**values, **changes})


def figures(responses, samples, **changes):
    values = {
        "evaluation": 1,
        "step": 3,
        "policy_version": 3,
        "samples": samples,
        "pass_reward": 1.0,
        "prompts_rejected": 0,
        "started_over": 0,
        "seconds": 1.0,
    }
    return summarize(responses, **{**values, **changes})


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_the_choices_of_k_that_hold_a_right_one(samples, data):
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    choices = list(combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("wrong", [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(wrong):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*wrong)


def test_powers_of_two_and_the_number_of_samples_are_reported():
    assert [reported_ks(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_the_figures_follow_from_the_responses():
    responses = [
        response(0, 0, 1.0, reward_parts={"right": 1.0, "short": 0.5}),
        response(0, 1, 0.5, response_tokens=30, finish_reason="length", reward_parts={"right": 0.5}),
        response(1, 0, 0.0),
        response(1, 1, None),
    ]
    result = figures(responses, 2)
    assert result.prompts == 2
    assert result.pass_at == {1: 0.25, 2: 0.5}
    assert result.pass_at_1_stderr == pytest.approx(0.25)  # of 0.5 and 0
    assert result.reward_mean == 0.5  # of the three that have one
    assert (result.response_tokens_mean, result.response_tokens_max, result.finish_length_fraction) == (15.0, 30, 0.25)
    assert result.errors == 1
    assert result.reward_parts == {"right": 0.75, "short": 0.5}  # of those that each applies to
    assert result.figures()["evaluation_pass_at_2"] == 0.5
    assert result.figures()["evaluation_reward_parts"] == result.reward_parts
    assert ("reward, right", "0.7500") in list(evaluation_rows(result))


def test_a_single_reward_is_not_told_twice():
    result = figures([response(0, 0, 1.0, reward_parts={"exact": 1.0})], 1)
    assert [what for what, _ in evaluation_rows(result) if what.startswith("reward")] == ["reward"]


def test_a_partial_reward_passes_where_the_user_says_so():
    assert figures([response(0, 0, 0.5)], 1, pass_reward=0.5).pass_at == {1: 1.0}


def test_no_reward_at_all_is_no_mean():
    result = figures([response(0, 0, None)], 1)
    assert result.reward_mean is None and result.pass_at == {1: 0.0}


def test_a_response_of_another_version_is_no_part_of_an_evaluation():
    with pytest.raises(ValueError, match="prompt 0 is of version 4"):
        figures([response(0, 0, 1.0, policy_version=4)], 1)


def test_each_prompt_has_the_same_number_of_responses():
    with pytest.raises(ValueError, match="1: 1"):
        figures([response(0, 0, 1.0), response(0, 1, 1.0), response(1, 0, 1.0)], 2)

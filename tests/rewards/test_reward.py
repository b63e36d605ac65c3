from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from laminar.errors import UserError
from laminar.rewards.conventions import RewardInput
from laminar.rewards.reward import Outcome, Reward

REQUEST = RewardInput(
    trajectory_id="g7-3",
    prompt="2 + 3?",
    response="5",
    answer="5",
    metadata={"level": 1},
    source="sums",
    num_tokens=2,
)


def outcome(function: Callable[..., Any]) -> Outcome:
    """In a loop and without one: both are to say the same."""
    reward = Reward("mine:reward", function)
    now, later = reward.score_now(REQUEST), asyncio.run(reward.score(REQUEST))
    assert repr(now) == repr(later)
    return now


def test_a_function_gets_the_arguments_that_it_declares() -> None:
    def all_four(*, prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
        return float((prompt, response, answer, metadata) == ("2 + 3?", "5", "5", {"level": 1}))

    def two(response: str, answer: str, strict: bool = False) -> bool:
        return response == answer and not strict

    def everything(**given: Any) -> int:
        return len(given)

    assert outcome(all_four) == Outcome(reward=1.0, error="")
    assert outcome(two) == Outcome(reward=1.0, error="")
    assert outcome(everything) == Outcome(reward=6.0, error="")


def test_functions_written_for_verl_and_for_trl() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        return {
            "score": float((data_source, extra_info) == ("sums", {"level": 1})),
            "acc": solution_str == ground_truth,
        }

    def reward_func(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        assert (prompts, kwargs) == (["2 + 3?"], {"level": [1], "source": ["sums"]})
        return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]

    assert outcome(compute_score) == Outcome(reward=1.0, error="")
    assert outcome(reward_func) == Outcome(reward=1.0, error="")
    assert "returned [] (list of 0)" in outcome(lambda completions: []).error


def test_async_functions_are_awaited() -> None:
    async def judge(*, response: str) -> float:
        await asyncio.get_running_loop().run_in_executor(None, len, response)
        return 0.25

    assert outcome(judge) == Outcome(reward=0.25, error="")


@pytest.mark.parametrize("value", [1, True, 0.5, np.float32(0.5), np.int64(1), np.array(0.5)])
def test_numbers_of_all_kinds(value: Any) -> None:
    assert outcome(lambda response: value).reward == float(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None (NoneType); expected a number"),
        ("1", "returned '1' (str); expected a number"),
        ([1, 2], "returned [1, 2] (list of 2); expected one number for one response"),
        ([], "returned [] (list of 0); expected one number for one response"),
        (["1"], "returned '1' (str); expected a number"),
        ({"score": None}, "returned None (NoneType); expected a number"),
        ({"reward": 1}, "returned {'reward': 1} (dict); expected a number"),
        (math.nan, "returned nan; expected a finite number"),
        (-math.inf, "returned -inf; expected a finite number"),
    ],
)
def test_what_is_no_reward(value: Any, message: str) -> None:
    result = outcome(lambda response: value)
    assert math.isnan(result.reward)
    assert result.error == f"trajectory g7-3: reward mine:reward {message}"


def test_an_exception_is_told_with_its_last_line_and_place() -> None:
    def broken(response: str) -> float:
        raise KeyError(response)

    async def cancelled(response: str) -> float:
        raise asyncio.CancelledError("mine")

    result = outcome(broken)
    assert math.isnan(result.reward)
    assert result.error.startswith("trajectory g7-3: reward mine:reward raised KeyError: '5' (")
    assert __file__ in result.error
    assert "\n" not in result.error
    assert "raised SystemExit: 3" in outcome(lambda response: sys.exit(3)).error
    assert "CancelledError: mine" in outcome(cancelled).error


async def test_cancelling_the_scoring_itself_goes_through() -> None:
    started = asyncio.Event()

    async def endless(response: str) -> float:
        started.set()
        await asyncio.Event().wait()
        return 0.0

    task = asyncio.create_task(Reward("endless", endless).score(REQUEST))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_functions_that_cannot_be_called() -> None:
    def needs_more(response: str, tests: list[str]) -> float:
        return 0.0

    with pytest.raises(
        UserError, match=r"reward\.function: m:f needs 'tests', but .*prompt, response, answer, metadata"
    ):
        Reward("m:f", needs_more)
    with pytest.raises(UserError, match=r"reward\.function: m:f is int, not a function"):
        Reward("m:f", 3)  # type: ignore[arg-type]

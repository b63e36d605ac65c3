"""The reward as an environment worker computes it: its parts in real processes, or in the loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError
from laminar.rewards.conventions import RewardInput
from laminar.workers.environment.reward_lanes import RewardLanes
from laminar.workers.environment.scoring import Scoring
from laminar.workers.environment.user_code import UserCodeThread

REPOSITORY = Path(__file__).parents[3]
MODULE = """
import asyncio, os, signal, subprocess, sys, time

def length(*, response): return len(response)

def odd(*, response):
    if response == "hang":
        subprocess.Popen(["sleep", "1000"])
        open("gate").read()
    if response == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if response == "leave": os._exit(3)
    if response == "main thread": signal.alarm(0)  # raises anywhere else
    if response == "text": return "1"
    return 1.0

def third_time(*, response):
    with open("attempts", "a") as file: file.write(response)
    if len(open("attempts").read()) < 3: raise ConnectionError("try again")
    return 0.5

async def judge(*, response):
    if response == "hang": await asyncio.Event().wait()
    return 0.25
"""

Score = Callable[..., Any]


@pytest.fixture
async def scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """`await scoring(reward={...})`: a scoring of that section; the user's functions are in `mine.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (tmp_path / "mine.py").write_text(MODULE)
    os.mkfifo(tmp_path / "gate")
    started: list[tuple[RewardLanes, UserCodeThread]] = []

    async def start(**reward: Any) -> Scoring:
        config = ExperimentConfig.model_validate(
            {
                "name": "test",
                "model": {"path": "model"},
                "data": {"source": {"type": "jsonl", "path": "data.jsonl"}},
                "reward": reward,
                "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2},
            }
        )
        lanes, thread = RewardLanes(), UserCodeThread()
        started.append((lanes, thread))
        await lanes.start(config)
        made = Scoring(config, lanes, thread)
        await made.start()
        return made

    yield start
    for lanes, thread in started:
        await lanes.stop()
        thread.stop()


def request(response: str, trajectory_id: str = "g1-0", source: str = "data.jsonl", answer: str = "") -> RewardInput:
    return RewardInput(
        trajectory_id=trajectory_id,
        prompt="?",
        response=response,
        answer=answer,
        metadata={},
        source=source,
        num_tokens=4,
    )


async def test_a_weighted_sum_and_its_parts(scoring: Score) -> None:
    made = await scoring(
        parts=[
            {"function": "mine:length", "name": "long", "weight": 0.5},
            {"function": "mine:judge"},
            {"function": "length_penalty", "weight": 2.0, "params": {"max_tokens": 8}},
            {"function": "exact", "sources": ["elsewhere"]},
        ]
    )
    score = await made.score(request("abcd"))
    assert (score.reward, score.error) == (0.5 * 4 + 0.25 - 2 * 0.5, "")
    assert score.parts == {"long": 4.0, "mine:judge": 0.25, "length_penalty": -0.5}
    score = await made.score(request("abcd", source="elsewhere", answer="abcd"))
    assert score.parts["exact"] == 1.0


async def test_a_source_without_a_part_has_no_reward(scoring: Score) -> None:
    made = await scoring(parts=[{"function": "mine:length", "sources": ["sums"]}])
    score = await made.score(request("abcd", "g1-7"))
    assert math.isnan(score.reward)
    assert score.error.startswith("trajectory g1-7: no part of the reward is for the source 'data.jsonl'")


async def test_what_hangs_or_crashes_costs_its_own_trajectory_only(scoring: Score) -> None:
    made = await scoring(function="mine:odd", timeout_s=2.0)
    bad = ["hang", "crash", "leave", "text"]
    scores = await asyncio.gather(
        *(made.score(request(response, response)) for response in [*bad, *["fine", "main thread"] * 10])
    )
    errors = {score.error for score in scores[:4]}
    assert errors == {
        "trajectory hang: reward mine:odd took longer than 2 s (timeout_s)",
        "trajectory crash: reward mine:odd lost its process (signal SIGSEGV)",
        "trajectory leave: reward mine:odd lost its process (exit status 3)",
        "trajectory text: reward mine:odd returned '1' (str); expected a number",
    }
    assert [score.reward for score in scores[4:]] == [1.0] * 20
    assert (await made.score(request("fine"))).reward == 1.0


async def test_nothing_is_left_of_a_lane_that_was_ended(scoring: Score, tmp_path: Path) -> None:
    made = await scoring(function="mine:odd", timeout_s=1.0)
    await made.score(request("hang"))
    commands = commands_in(tmp_path)
    assert any(b"reward_host" in command for command in commands)
    assert not [command for command in commands if b"sleep" in command]


def commands_in(folder: Path) -> list[bytes]:
    """Command lines of all processes that work in a folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(os.readlink(f"/proc/{pid}/cwd")) == folder:
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


async def test_attempts(scoring: Score) -> None:
    made = await scoring(parts=[{"function": "mine:third_time", "retries": 2}])
    assert (await made.score(request("x"))).reward == 0.5
    made = await scoring(function="mine:odd", retries=1, timeout_s=1.0)
    assert "lost its process" in (await made.score(request("crash"))).error


async def test_a_response_on_which_math_verify_takes_too_long_is_wrong(scoring: Score) -> None:
    made = await scoring(function="math_verify", timeout_s=2.0)
    slow, right = await asyncio.gather(
        made.score(request("\\boxed{10^{10^{10}}}", answer="7")), made.score(request("\\boxed{7}", answer="7"))
    )
    assert (slow.reward, slow.error) == (0.0, "")
    assert right.reward == 1.0
    unreadable = await made.score(request("\\boxed{7}", "g2-1", answer=" "))
    assert (
        "trajectory g2-1: reward math_verify raised ValueError: math-verify finds no mathematical expression"
        in unreadable.error
    )


async def test_a_coroutine_that_hangs_delays_no_other(scoring: Score) -> None:
    made = await scoring(function="mine:judge", timeout_s=1.0)
    hung, *others = await asyncio.gather(*(made.score(request(response)) for response in ("hang", "a", "b")))
    assert hung.error == "trajectory g1-0: reward mine:judge took longer than 1 s (timeout_s)"
    assert [score.reward for score in others] == [0.25, 0.25]


async def test_a_part_that_cannot_be_loaded(scoring: Score) -> None:
    with pytest.raises(UserError, match=r"reward\.parts\.1\.function: mine:nothing: mine has no 'nothing'"):
        await scoring(parts=[{"function": "mine:length"}, {"function": "mine:nothing"}])

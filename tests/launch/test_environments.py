"""`laminar train` with trajectories of several turns, on real parts: the torch engine, the sandbox, a class of the user's own."""

import os
from pathlib import Path

import pytest

from tests.launch.live_run import LiveRun, write_config

ENVIRONMENT = """
from laminar.environments.environment import Step
from laminar.environments.sandbox import run_python

class Adder:
    def __init__(self, *, sandbox, add):
        self.sandbox, self.add, self.turns = sandbox, add, 0

    def reset(self, prompt):
        return "!"

    async def step(self, response):
        self.turns += 1
        result = await run_python(f"print({self.turns} + {self.add})", limits=self.sandbox)
        return Step(observation=f"<{result.stdout.strip()}>", reward=0.125)

    def close(self):
        pass
"""


@pytest.fixture
def start(tmp_path, model, runs):
    (tmp_path / "adder_environment.py").write_text(ENVIRONMENT)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])

    async def start(**overrides):
        config, name = write_config(tmp_path, model, **overrides)
        run = await LiveRun(config, tmp_path / "run", name).start(PYTHONPATH=paths)
        runs.append(run)
        return run

    return start


async def test_turns_are_answered_trained_and_recorded(start):
    # The model is random and knows no end: most of the bytes that it writes end a turn here.
    stop = [chr(code) for code in range(33, 100)]
    environment = {"name": "adder_environment:Adder", "params": {"add": 40}, "max_turns": 3, "stop": stop}
    run = await start(environment=environment, rollout__max_response_tokens=40, trainer__steps=2)
    assert await run.end() == 0, run.output
    lines = run.lines("metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert 1 < line["turns_mean"] <= 3 and line["finish_turns_fraction"] > 0
        assert line["environment_s_mean"] > 0
        assert line["reward_mean"] > 0.125  # the environment's own
    # Behind every observation the engine's logprobs are those of the trainer: all tokens stand where they were generated.
    assert lines[0]["mismatch_kl"] < 1e-6
    ended = [line for line in run.lines("trajectories.jsonl") if line["finish_reason"] == "turns"]
    assert ended and all(line["turns"] == 3 and line["environment_s"] > 0 for line in ended)
    assert min(line["response_tokens"] for line in ended) >= 3 + 2 * len("<41>")


async def test_an_environment_that_is_not_there_is_said_before_anything_starts(start):
    run = await start(environment={"name": "adder_environment:Added"})
    assert await run.end() == 2
    assert "environment.name" in run.output and "Adder" in run.output
    assert not run.run_dir.exists()

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from laminar.protocol.messages import (
    FetchPrompts,
    PromptRecord,
    PromptsFetched,
    ScoreTrajectory,
    TrajectoryScored,
    WorkerFailed,
)

REWARDS = """
import asyncio, os, sys
second_came = None

def length(*, prompt, response, answer, metadata):
    return len(response) + 10 * len(answer) + 100 * metadata.get("bonus", 0) + 1000 * len(prompt)

def by_response(*, response):
    if response == "raise":
        raise ValueError("cannot judge\\nthis poem")
    if response == "exit":
        sys.exit("no more")
    if response == "block":
        with open("gate") as gate:  # a named pipe: opens when the test opens its other end
            return float(gate.read())
    return float(response)

async def in_pairs(*, response):
    global second_came
    if response == "first":
        second_came = asyncio.Event()
        await second_came.wait()
        return 1.0
    second_came.set()
    return 2.0

def hang(*, response):
    open("gate").read()
"""


class Scorer:
    """Makes the messages that ask for a score."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))

    def text(self, prompt: PromptRecord) -> str:
        return str(self._tokenizer.decode(prompt.token_ids))

    def ask(self, trajectory_id: str, response: str, prompt: PromptRecord | None = None) -> ScoreTrajectory:
        ids = [*self._tokenizer.encode(response), self._tokenizer.eos_token_id]
        return ScoreTrajectory(
            trajectory_id=trajectory_id,
            source=prompt.source if prompt else "data.jsonl",
            prompt_text=prompt.text if prompt else "?",
            answer=prompt.answer if prompt else "",
            metadata=prompt.metadata if prompt else "{}",
            token_ids=np.asarray(ids, dtype=np.int32),
            turn_start=0,
            turn_end=len(ids),
        )


def contents(fetched: PromptsFetched) -> list[tuple[Any, ...]]:
    return [(p.prompt_id, p.source, p.text, p.token_ids.tolist(), p.answer, p.metadata) for p in fetched.prompts]


async def test_generated_prompts_and_their_own_score(start_ready: Callable[..., Any], project: Path) -> None:
    datasets = [{"name": "spell_backward", "weight": 0.75}, {"name": "chain_sum", "weight": 0.25}]
    data = {"source": {"type": "reasoning_gym", "datasets": datasets}, "prompt_template": "{question}\nAnswer:"}
    worker = await start_ready(data=data)
    assert [text.split()[0] for text in worker.progress] == ["loading", "opening", "loading"]

    fetched = await worker.ask(FetchPrompts(start=8, count=8))
    assert (fetched.start, fetched.exhausted) == (8, False)
    assert [prompt.prompt_id for prompt in fetched.prompts] == list(range(8, 16))
    assert sorted(prompt.source for prompt in fetched.prompts) == ["chain_sum"] * 2 + ["spell_backward"] * 6
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(project / "model"))
    for prompt in fetched.prompts:
        assert prompt.token_ids.dtype == np.int32
        assert tokenizer.decode(prompt.token_ids) == f"{prompt.text}\nAnswer:"
    assert contents(await worker.ask(FetchPrompts(start=8, count=8))) == contents(fetched)

    scorer = Scorer(project / "model")
    for prompt in fetched.prompts:
        scored = await worker.ask(scorer.ask("right", prompt.answer, prompt))
        assert scored == TrajectoryScored(
            trajectory_id="right", reward=1.0, response_text=prompt.answer, error="", parts={"reasoning_gym": 1.0}
        )
        assert (await worker.ask(scorer.ask("wrong", "#", prompt))).reward < 0.5
    assert await worker.shut_down() == 0


async def test_every_worker_makes_the_same_prompts_whatever_its_hash_seed(start_ready: Callable[..., Any]) -> None:
    names = ["ransom_note", "word_ladder", "list_functions"]
    data = {"source": {"type": "reasoning_gym", "datasets": [{"name": name} for name in names]}}
    workers = await asyncio.gather(*(start_ready(data=data, PYTHONHASHSEED=hash_seed) for hash_seed in ("1", "2")))
    made = [contents(await worker.ask(FetchPrompts(start=0, count=12))) for worker in workers]
    assert made[0] == made[1]
    assert [await worker.shut_down() for worker in workers] == [0, 0]


async def test_the_end_of_a_file_and_the_users_own_reward(
    start_ready: Callable[..., Any], jsonl: Callable[..., dict[str, Any]], project: Path
) -> None:
    (project / "tasks").mkdir()
    (project / "tasks" / "mine.py").write_text(REWARDS)
    source = jsonl(*({"prompt": f"p{number}", "answer": "ab", "bonus": number} for number in range(3)))
    worker = await start_ready(data={"source": source, "epochs": 2}, function="tasks.mine:length")

    first = await worker.ask(FetchPrompts(start=0, count=4))
    assert (len(first.prompts), first.exhausted) == (4, False)
    rest = await worker.ask(FetchPrompts(start=4, count=4))
    assert (rest.start, len(rest.prompts), rest.exhausted) == (4, 2, True)
    assert (await worker.ask(FetchPrompts(start=0, count=6))).exhausted
    beyond = await worker.ask(FetchPrompts(start=6, count=4))
    assert (beyond.prompts, beyond.exhausted) == ((), True)
    texts = [prompt.text for prompt in first.prompts + rest.prompts]
    assert sorted(texts[:3]) == sorted(texts[3:]) == ["p0", "p1", "p2"]

    scorer = Scorer(project / "model")
    prompt = next(prompt for prompt in first.prompts if prompt.text == "p2")
    scored = await worker.ask(scorer.ask("t", "long", prompt))
    assert (scored.reward, scored.response_text, scored.error) == (4 + 20 + 200 + 2000, "long", "")
    assert await worker.shut_down() == 0


async def test_rewards_that_fail_are_answers_and_the_worker_goes_on(
    start_ready: Callable[..., Any], jsonl: Callable[..., dict[str, Any]], project: Path
) -> None:
    (project / "mine.py").write_text(REWARDS)
    os.mkfifo(project / "gate")
    worker = await start_ready(data={"source": jsonl({"prompt": "p"})}, function="mine:by_response")
    scorer = Scorer(project / "model")

    raised = await worker.ask(scorer.ask("g1-0", "raise"))
    assert math.isnan(raised.reward)
    assert raised.response_text == "raise"
    assert raised.error.startswith(
        "trajectory g1-0: reward mine:by_response raised ValueError: cannot judge this poem ("
    )
    assert f"{project / 'mine.py'}:10)" in raised.error
    assert "raised SystemExit: no more" in (await worker.ask(scorer.ask("g1-1", "exit"))).error
    infinite = await worker.ask(scorer.ask("g1-2", "nan"))
    assert math.isnan(infinite.reward)
    assert infinite.error == "trajectory g1-2: reward mine:by_response returned nan; expected a finite number"
    assert (await worker.ask(scorer.ask("g1-3", "0.5"))).reward == 0.5

    # A reward that takes its time does not keep heartbeats from being sent.
    await worker.send(scorer.ask("g1-4", "block"))
    before = worker.heartbeats
    while worker.heartbeats < before + 5:
        await worker.receive_any()
    (project / "gate").write_text("0.25")
    assert (await worker.receive()).reward == 0.25
    assert await worker.shut_down() == 0


async def test_async_rewards_interleave(
    start_ready: Callable[..., Any], jsonl: Callable[..., dict[str, Any]], project: Path
) -> None:
    (project / "mine.py").write_text(REWARDS)
    worker = await start_ready(data={"source": jsonl({"prompt": "p"})}, function="mine:in_pairs")
    scorer = Scorer(project / "model")
    await worker.send(scorer.ask("a", "first"))
    await worker.send(scorer.ask("b", "second"))
    answers = [await worker.receive(), await worker.receive()]
    assert {answer.trajectory_id: answer.reward for answer in answers} == {"a": 1.0, "b": 2.0}
    await worker.send(scorer.ask("c", "first"))  # never answered: given up at the end
    assert await worker.shut_down() == 0


async def test_a_hanging_reward_does_not_keep_the_process(
    start_ready: Callable[..., Any], jsonl: Callable[..., dict[str, Any]], project: Path
) -> None:
    (project / "mine.py").write_text(REWARDS)
    os.mkfifo(project / "gate")
    worker = await start_ready(data={"source": jsonl({"prompt": "p"})}, function="mine:hang")
    await worker.send(Scorer(project / "model").ask("a", "x"))
    gate = os.open(project / "gate", os.O_WRONLY)  # opens when the reward has opened its end, which then waits for text
    assert await worker.shut_down() == 0
    os.close(gate)


async def test_the_users_mistakes_end_the_worker_with_a_message(
    start: Callable[..., Any], start_ready: Callable[..., Any], jsonl: Callable[..., dict[str, Any]], project: Path
) -> None:
    source = jsonl({"prompt": "p", "answer": "1"})
    worker = await start(data={"source": source}, function="mine:reward")
    failed = await worker.receive()
    assert isinstance(failed, WorkerFailed)
    assert failed.user_error
    assert failed.error.startswith("reward.function: mine:reward: importing mine failed: ModuleNotFoundError")
    assert await worker.exit_status() == 2


async def test_rows_that_cannot_be_used_are_told_and_the_worker_goes_on(
    start_ready: Callable[..., Any], jsonl: Callable[..., dict[str, Any]], project: Path
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "by": "x"}, {"text": "b"}, {"prompt": "c"}, {"prompt": ["d"]}]
    data = {"source": {**jsonl(*rows), "shuffle": False}, "prompt_template": "{question} {by}"}
    worker = await start_ready(data=data, function="exact")
    prompts = (await worker.ask(FetchPrompts(start=0, count=4))).prompts
    assert [(prompt.prompt_id, bool(len(prompt.token_ids))) for prompt in prompts] == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
    ]
    errors = [prompt.error for prompt in prompts]
    assert errors[0] == "" and prompts[1].source == "data.jsonl"
    assert errors[1].startswith("data.jsonl:2: no key 'prompt'; the keys are: text")
    assert errors[2].startswith("data.prompt_template: no field 'by'")
    assert errors[3].startswith("data.jsonl:4: prompt: expected text that is not empty, or a list of chat messages")
    assert await worker.shut_down() == 0


GAME = """
from laminar.environments.environment import Step

class Game:
    def reset(self, prompt):
        return f" (of {int(prompt.answer)})"

    def step(self, response):
        return Step(done=True)

    def close(self):
        pass
"""


async def test_a_prompt_with_which_the_environment_cannot_begin_is_told_and_the_worker_goes_on(
    start: Callable[..., Any], start_ready: Callable[..., Any], jsonl: Callable[..., dict[str, Any]], project: Path
) -> None:
    (project / "game.py").write_text(GAME)
    (project / "model" / "generation_config.json").write_text('{"eos_token_id": 257}')
    source = {**jsonl({"prompt": "a", "answer": "7"}, {"prompt": "b", "answer": "seven"}), "shuffle": False}
    environment = {"name": "game:Game", "retries": 0}
    worker = await start_ready(data={"source": source}, function="exact", environment=environment)
    good, bad = (await worker.ask(FetchPrompts(start=0, count=2))).prompts
    assert Scorer(project / "model").text(good) == "a (of 7)" and not good.error
    assert bad.error.startswith("environment game:Game could not begin with it: ValueError: invalid literal for int()")
    assert "game.py" in bad.error
    assert await worker.shut_down() == 0

    environment["on_error"] = "fail"
    worker = await start_ready(data={"source": source}, function="exact", environment=environment)
    failed = await worker.ask(FetchPrompts(start=0, count=2))
    assert isinstance(failed, WorkerFailed) and failed.user_error
    assert failed.error.startswith("prompt 1 of data.jsonl: environment game:Game could not begin with it: ValueError")
    assert "environment.on_error: drop" in failed.error


EVALUATION_REWARD = {
    "parts": [
        {"function": "numeric"},
        {"function": "length_penalty", "weight": 0.5, "params": {"max_tokens": 8}},
    ]
}


async def test_held_out_prompts_are_those_of_the_evaluation_and_scored_by_its_reward(
    start_ready: Callable[..., Any], jsonl: Callable[..., dict[str, Any]], project: Path
) -> None:
    source = jsonl(*({"prompt": f"p{number}", "answer": "x"} for number in range(3)))
    held_out = project / "held-out.jsonl"
    held_out.write_text('{"prompt": "held", "answer": "4.0"}\n')
    evaluation = {"source": {"type": "jsonl", "path": str(held_out)}, "reward": EVALUATION_REWARD}
    worker = await start_ready(data={"source": source}, function="exact", evaluation=evaluation)

    fetched = await worker.ask(FetchPrompts(start=0, count=4, evaluation=True))
    assert [prompt.text for prompt in fetched.prompts] == ["held"]
    assert (fetched.evaluation, fetched.exhausted) == (True, True)
    trained = await worker.ask(FetchPrompts(start=0, count=2))
    assert {prompt.text for prompt in trained.prompts} <= {"p0", "p1", "p2"} and not trained.evaluation

    question = Scorer(project / "model").ask("t", "4", fetched.prompts[0])
    assert (await worker.ask(question)).reward == 0.0  # exact: "4" is not "4.0"
    scored = await worker.ask(replace(question, evaluation=True))
    assert scored.reward == 1.0 - 0.5 * 0.25  # numeric, and a penalty for two tokens of eight
    assert scored.parts == {"numeric": 1.0, "length_penalty": -0.25}
    assert await worker.shut_down() == 0

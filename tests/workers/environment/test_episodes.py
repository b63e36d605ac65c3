"""Environments of trajectories under way: kept between turns, led to where they stood, closed."""

import asyncio
import sys
import threading

import numpy as np
import pytest

from laminar.data.observation import ObservationEncoder
from laminar.environments.environment import EnvironmentPrompt, Step
from laminar.errors import UserError
from laminar.protocol.messages import StepEnvironment
from laminar.workers.environment import episodes as module
from laminar.workers.environment.episodes import BeginFailed, Episodes
from tests.tiny_models import make_tokenizer


class Counting:
    """Says how many turns it has seen, and all of them."""

    made = ()

    def __init__(self):
        self.turns, self.closed, self.prompt = [], 0, None
        Counting.made = (*Counting.made, self)

    async def reset(self, prompt):
        self.prompt = prompt
        return f"hello {prompt.text}"

    async def step(self, response):
        self.turns.append(response)
        if response == "raise":
            raise ValueError("no such move")
        if response == "exit":
            raise SystemExit(3)
        if response == "nonsense":
            return "text"
        if response == "user":
            raise UserError("chat template")
        return Step(observation=f"{len(self.turns)}:{'|'.join(self.turns)}", reward=0.5, done=response == "end")

    def close(self):  # plain functions will do, too
        self.closed += 1


@pytest.fixture
def tokenizer(tmp_path):
    Counting.made = ()
    return make_tokenizer(tmp_path)


@pytest.fixture
def encoder(tokenizer):
    return ObservationEncoder(tokenizer, chat=False, max_tokens=100, stop_token_ids=[tokenizer.eos_token_id])


@pytest.fixture
def ask(tokenizer):
    """A message with these turns; observations between them are three tokens long."""

    def make(*turns, trajectory_id="0.0", lease=1):
        ids, starts, ends = [], [], []
        for turn in turns:
            starts.append(len(ids))
            ids += [*tokenizer.encode(turn), tokenizer.eos_token_id]
            ends.append(len(ids))
            ids += [1, 2, 3]
        return StepEnvironment(
            trajectory_id=trajectory_id,
            lease=lease,
            source="test",
            prompt_text="world",
            answer="42",
            metadata='{"level": 3}',
            token_ids=np.array(ids[:-3], np.int32),
            turn_starts=np.array(starts, np.int32),
            turn_ends=np.array(ends, np.int32),
        )

    return make


def text(tokenizer, answer):
    return tokenizer.decode(answer.token_ids.tolist())


async def test_one_environment_sees_all_turns_of_a_trajectory(tokenizer, encoder, ask):
    episodes = Episodes(Counting, encoder, limit_s=60.0)
    first = await episodes.step(ask("a", lease=7))
    second = await episodes.step(ask("a", "b", lease=8))
    assert (text(tokenizer, first), text(tokenizer, second)) == ("1:a", "2:a|b")
    assert (first.lease, second.lease, second.reward, second.done, second.error) == (7, 8, 0.5, False, "")
    last = await episodes.step(ask("a", "b", "end"))
    assert last.done and not len(last.token_ids)
    (environment,) = Counting.made
    assert environment.closed == 1
    assert environment.prompt == EnvironmentPrompt(text="world", answer="42", metadata={"level": 3}, source="test")


async def test_another_worker_leads_a_new_one_through_the_turns(tokenizer, encoder, ask):
    answer = await Episodes(Counting, encoder, limit_s=60.0).step(ask("a", "b", "c"))
    assert text(tokenizer, answer) == "3:a|b|c"


async def test_one_that_has_seen_other_turns_is_not_taken(tokenizer, encoder, ask):
    """The trajectory was generated anew meanwhile, and its first turn was answered elsewhere."""
    episodes = Episodes(Counting, encoder, limit_s=60.0)
    await episodes.step(ask("a"))
    assert text(tokenizer, await episodes.step(ask("x", "b"))) == "2:x|b"
    assert text(tokenizer, await episodes.step(ask("y"))) == "1:y"  # from the beginning
    assert [environment.closed for environment in Counting.made] == [1, 1, 0]


@pytest.mark.parametrize(
    ("turn", "said"),
    [("raise", "ValueError: no such move"), ("exit", "SystemExit: 3"), ("nonsense", "step returned 'text' (str)")],
)
async def test_a_failure_is_an_answer(encoder, ask, turn, said):
    episodes = Episodes(Counting, encoder, limit_s=60.0)
    answer = await episodes.step(ask("a", turn))
    assert said in answer.error
    assert Counting.made[0].closed == 1
    assert (await episodes.step(ask("a", "b"))).error == ""  # tried again, with a new one


async def test_one_that_takes_too_long_is_given_up(encoder, ask):
    class Slow(Counting):
        async def step(self, response):
            await asyncio.sleep(1000)

    answer = await Episodes(Slow, encoder, limit_s=0.01).step(ask("a"))
    assert answer.error == "it took longer than 0.01 s"
    assert Counting.made[0].closed == 1


class Plain:
    """Blocks in any of its methods until the test lets it go on; `entered` says where."""

    def __init__(self, blocks=None):
        self.blocks, self.entered, self.gate = blocks, threading.Event(), threading.Event()

    def _maybe_block(self, method):
        if method == self.blocks:
            self.entered.set()
            self.gate.wait()

    def reset(self, prompt):
        self._maybe_block("reset")

    def step(self, response):
        self._maybe_block("step")
        return Step(observation=response)

    def close(self):
        self._maybe_block("close")


async def test_a_plain_method_that_blocks_holds_up_no_other_trajectory(tokenizer, encoder, ask):
    made = iter([blocking := Plain("step"), Plain()])
    episodes = Episodes(lambda: next(made), encoder, limit_s=60.0)
    first = asyncio.create_task(episodes.step(ask("slow", trajectory_id="0.0")))
    await asyncio.to_thread(blocking.entered.wait)
    assert text(tokenizer, await episodes.step(ask("quick", trajectory_id="1.0"))) == "quick"
    assert not first.done()
    blocking.gate.set()
    assert text(tokenizer, await first) == "slow"


@pytest.mark.parametrize("method", ["reset", "step"])
async def test_a_plain_method_that_never_returns_is_given_up(encoder, ask, method):
    hanging = Plain(method)
    answer = await Episodes(lambda: hanging, encoder, limit_s=0.01).step(ask("a"))
    assert answer.error == "it took longer than 0.01 s"
    hanging.gate.set()


async def test_a_turn_that_is_over_does_not_wait_for_a_close_that_never_returns(encoder, ask, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_LIMIT_S", 0.01)
    hanging = Plain("close")
    hanging.step = lambda response: Step(done=True)
    assert (await Episodes(lambda: hanging, encoder, limit_s=60.0).step(ask("a"))).done
    hanging.gate.set()


@pytest.mark.parametrize(
    ("reset", "said"),
    [
        (lambda prompt: int(prompt.answer), "ValueError: invalid literal for int"),
        (lambda prompt: sys.exit(3), "SystemExit: 3"),
        (lambda prompt: 42, "reset returned 42 (int); expected text or None"),
    ],
)
async def test_an_environment_that_cannot_begin_says_why(encoder, reset, said):
    environment = Counting()
    environment.reset = reset
    episodes = Episodes(lambda: environment, encoder, limit_s=60.0)
    with pytest.raises(BeginFailed) as failure:
        await episodes.first_observation(EnvironmentPrompt(text="", answer="no number", metadata={}, source=""))
    assert said in str(failure.value)
    assert environment.closed == 1


async def test_a_users_mistake_ends_the_worker(encoder, ask):
    with pytest.raises(UserError):
        await Episodes(Counting, encoder, limit_s=60.0).step(ask("user"))


async def test_the_first_observation_comes_from_an_environment_of_its_own(encoder):
    episodes = Episodes(Counting, encoder, limit_s=60.0)
    prompt = EnvironmentPrompt(text="you", answer="", metadata={}, source="")
    assert await episodes.first_observation(prompt) == "hello you"
    assert Counting.made[0].closed == 1


async def test_not_more_are_kept_than_that_and_all_are_closed_at_the_end(encoder, ask, monkeypatch):
    monkeypatch.setattr(module, "KEPT_EPISODES", 2)
    episodes = Episodes(Counting, encoder, limit_s=60.0)
    for number in range(4):
        await episodes.step(ask("a", trajectory_id=f"{number}.0"))
    assert [environment.closed for environment in Counting.made] == [1, 1, 0, 0]
    await episodes.close()
    assert [environment.closed for environment in Counting.made] == [1, 1, 1, 1]

"""The torch engine's prefix cache: a trajectory that comes back for another turn is not computed from its beginning."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from laminar.weights.store import WeightStore
from laminar.weights.tensors import layout_of, write_tensors
from laminar.workers.rollout.decode_batch import DecodeBatch
from laminar.workers.rollout.step_times import StepTimes
from tests.tiny_models import make_model
from tests.workers.rollout.test_torch_engine import SETTINGS, make_request


class Engine:
    """A batch, and how many tokens its model has been given beside one for each that was decoded."""

    def __init__(self, path, *, several_turns=True, **changes):
        settings = replace(SETTINGS, model_path=str(path), several_turns=several_turns, **changes)
        self.batch, self.computed = DecodeBatch(settings, StepTimes()), 0
        model, prefill, extend = self.batch.model, self.batch.model.prefill, self.batch.model.extend
        model.prefill = lambda tokens, *more: (self.count(tokens), prefill(tokens, *more))[1]
        model.extend = lambda tokens, *more: (self.count(tokens), extend(tokens, *more))[1]

    def count(self, tokens):
        self.computed += tokens.size

    def turn(self, prompt, tokens=(), length=10):
        """(tokens, logprobs, tokens that were computed for it) of one turn, alone."""
        before = self.computed
        row = self.add(prompt, tokens, length)
        while row.finish_reason is None:
            self.batch.step()
        return row.token_ids, row.logprobs, self.computed - before

    def add(self, prompt, tokens=(), length=10):
        name = f"{len(prompt)}-{len(tokens)}"
        request = make_request(name, prompt, token_ids=np.array(tokens, np.int32), max_new_tokens=length)
        return self.batch.add(request)


@pytest.fixture
def model(tmp_path):
    torch.set_num_threads(1)
    return make_model(tmp_path / "a", seed=0)


PROMPT, OBSERVATION = list(range(20, 40)), [7, 8, 9, 10]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_next_turn_is_computed_from_the_end_of_the_last(model, dtype):
    engine, plain = Engine(model, dtype=dtype), Engine(model, several_turns=False, dtype=dtype)
    first, _, computed = engine.turn(PROMPT)
    assert computed == len(PROMPT)
    so_far = [*first, *OBSERVATION]
    second, logprobs, computed = engine.turn(PROMPT, so_far)
    assert computed == 1 + len(OBSERVATION)  # the last token of a turn is in no cache yet
    expected, theirs, whole = plain.turn(PROMPT, so_far)
    assert whole == len(PROMPT) + len(so_far)
    if dtype == "float32":
        assert second == expected
        np.testing.assert_allclose(logprobs, theirs, atol=1e-5)
    else:
        np.testing.assert_allclose(logprobs[0], theirs[0], atol=0.05)


def test_what_the_engine_made_beyond_a_stop_text_is_not_taken_for_the_turn(model):
    engine, plain = Engine(model), Engine(model, several_turns=False)
    first, _, _ = engine.turn(PROMPT)
    so_far = [*first[:6], *OBSERVATION]
    second, _, computed = engine.turn(PROMPT, so_far)
    assert second == plain.turn(PROMPT, so_far)[0]
    assert computed <= len(OBSERVATION)


def test_another_trajectory_of_the_same_prompt_does_not_take_it(model):
    engine = Engine(model)
    first, _, _ = engine.turn(PROMPT)
    _, _, computed = engine.turn(PROMPT)
    assert computed == len(PROMPT)
    _, _, computed = engine.turn(PROMPT, [*first, *OBSERVATION])
    assert computed == 1 + len(OBSERVATION)


def test_nothing_outlives_the_weights_that_made_it(model, tmp_path):
    engine = Engine(model)
    first, _, _ = engine.turn(PROMPT)
    other = make_model(tmp_path / "b", seed=1)
    state = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).state_dict()
    store = WeightStore("kept-prefixes", "weights", base=tmp_path)
    with store.begin(1, layout_of(state)) as writer:
        write_tensors(writer, state.items())
        path = writer.commit()
    engine.batch.load_weights(str(path), 1)
    so_far = [*first, *OBSERVATION]
    second, _, computed = engine.turn(PROMPT, so_far)
    assert computed == len(PROMPT) + len(so_far)
    assert second == Engine(other).turn(PROMPT, so_far)[0]


def test_with_too_few_slots_the_oldest_makes_room(model):
    engine = Engine(model)  # four slots
    prompts = [[k, *PROMPT] for k in range(5)]
    firsts = [engine.turn(prompt)[0] for prompt in prompts]
    computed = [engine.turn(prompts[k], [*firsts[k], *OBSERVATION], length=1)[2] for k in (4, 3, 2)]
    assert computed == [1 + len(OBSERVATION)] * 3
    assert engine.turn(prompts[0], [*firsts[0], *OBSERVATION])[2] == len(prompts[0]) + 10 + len(OBSERVATION)


@pytest.mark.parametrize("seed", range(3))
def test_many_trajectories_come_and_go_and_all_tokens_are_those_of_a_fresh_engine(model, seed):
    draw = random.Random(seed)
    engine, plain = Engine(model), Engine(model, several_turns=False)
    prompts = [[draw.randrange(256) for _ in range(draw.randint(3, 12))] for _ in range(7)]
    away = {k: [] for k in range(7)}  # trajectory -> its tokens so far, while no engine has it
    running, turns = {}, 0
    while turns < 60:
        for k in draw.sample(sorted(away), min(len(away), draw.randint(0, 3))):
            running[k] = (away.pop(k), draw.randint(1, 9))
            running[k] = (engine.add(prompts[k], *running[k]), *running[k])
        for _ in range(draw.randint(1, 6)):
            engine.batch.step()
        for k, (row, tokens, length) in list(running.items()):
            if row.finish_reason is None and draw.random() < 0.1 and row.token_ids:
                engine.batch.abort(row)
            if row.finish_reason is None:
                continue
            del running[k]
            expected = plain.turn(prompts[k], tokens, length)[0]
            assert row.token_ids == expected[: len(row.token_ids)], "the cache held something else"
            if row.finish_reason == "length":
                assert len(row.token_ids) == length
            so_far = [*tokens, *row.token_ids, *(draw.randrange(256) for _ in range(draw.randint(0, 5)))]
            away[k] = so_far if len(prompts[k]) + len(so_far) < 100 else []
            turns += 1
    assert engine.computed < 0.8 * plain.computed, "hardly anything was found again"

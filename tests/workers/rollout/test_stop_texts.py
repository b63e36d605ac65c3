"""Texts that end a turn, however they are cut into tokens."""

import asyncio

import numpy as np
import pytest

from laminar.workers.rollout.engine import EngineDelta, GenerationRequest
from laminar.workers.rollout.main import RolloutWorker
from laminar.workers.rollout.stop_texts import StopTexts
from tests.tiny_models import make_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path)


def ids(tokenizer, text):
    return np.array(tokenizer.encode(text), np.int32)


def kept(tokenizer, texts, *deltas, before=""):
    """Text of each delta that belongs to the turn; None from where it has ended."""
    watch = StopTexts(tokenizer, texts).watch(ids(tokenizer, before))
    found = []
    for delta in deltas:
        count = watch.tokens_to_keep(ids(tokenizer, delta))
        found.append(None if count is None else delta[:count])
    return found


def test_a_turn_ends_with_the_token_in_which_the_text_ends(tokenizer):
    assert kept(tokenizer, ["</c>"], "print(1)</c> and more") == ["print(1)</c>"]
    assert kept(tokenizer, ["</c>"], "print(1)") == [None]


def test_a_text_may_come_in_several_deltas(tokenizer):
    assert kept(tokenizer, ["</c>"], "1 <", "/", "c", "> x") == [None, None, None, ">"]


def test_the_first_of_several_texts_counts(tokenizer):
    assert kept(tokenizer, ["END", "</c>"], "a</c>END") == ["a</c>"]
    assert kept(tokenizer, ["</c>", "END"], "aEND</c>") == ["aEND"]


def test_what_was_generated_elsewhere_before_counts(tokenizer):
    assert kept(tokenizer, ["</c>"], "> x", before="print(1)</c") == [">"]


def test_a_text_that_has_ended_before_does_not_end_the_next_turn(tokenizer):
    assert kept(tokenizer, ["</c>"], "x", before="</c>") == [None]
    assert kept(tokenizer, ["</c>"], ">", before="</c>") == [None]


def test_characters_of_several_tokens(tokenizer):
    text = "»"
    assert len(tokenizer.encode(text)) == 2
    watch = StopTexts(tokenizer, [text]).watch(ids(tokenizer, ""))
    assert watch.tokens_to_keep(ids(tokenizer, f"é{text}x")) == 4


def test_texts_that_are_one_token_are_given_to_the_engine(tokenizer):
    assert StopTexts(tokenizer, ["</c>", "$"]).token_ids == (tokenizer.encode("$")[0],)


class Engine:
    """Makes these deltas; notes what it is told, and when its streams end."""

    name = "fake"

    def __init__(self, deltas):
        self.deltas, self.aborted, self.open = deltas, [], False

    async def generate(self, request):
        self.open = True
        for token_ids in self.deltas:
            if self.aborted:
                break
            yield delta(token_ids, None)
        self.open = False
        yield delta([9], "abort" if self.aborted else "length")

    async def abort(self, request_id):
        self.aborted.append(request_id)


def delta(token_ids, finish_reason):
    return EngineDelta(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.full(len(token_ids), -0.5, np.float32),
        policy_version=3,
        finish_reason=finish_reason,
    )


class Session:
    class config:
        rollout = None


def turn(engine, stops):
    request = GenerationRequest(
        request_id="0.0/1",
        prompt_token_ids=np.array([1], np.int32),
        token_ids=np.empty(0, np.int32),
        max_new_tokens=50,
        temperature=1.0,
        top_p=1.0,
        stop_token_ids=(),
    )

    async def main():
        worker = RolloutWorker(Session(), engine, (), stop_texts=stops)
        made = []
        async for one in worker._turn(None, request):
            made.append((one.token_ids.tolist(), len(one.logprobs), one.finish_reason, engine.open))
        return made

    return asyncio.run(main())


def test_a_rollout_ends_the_turn_and_drops_what_the_engine_makes_beyond_it(tokenizer):
    stop = tokenizer.encode("</c>")
    engine = Engine([tokenizer.encode("ab"), [*stop, 5, 6], [7], [8]])
    made = turn(engine, StopTexts(tokenizer, ["</c>"]))
    assert made == [
        (tokenizer.encode("ab"), 2, None, True),
        (stop, 4, "stop", False),  # only when the engine is through with it: weights may be loaded then
    ]
    assert engine.aborted == ["0.0/1"]


def test_without_a_stop_text_everything_passes(tokenizer):
    engine = Engine([[1, 2], [3]])
    made = turn(engine, StopTexts(tokenizer, ["</c>"]))
    assert [one[0] for one in made] == [[1, 2], [3], [9]]
    assert made[-1][2] == "length" and not engine.aborted

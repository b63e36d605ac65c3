from __future__ import annotations

import logging

import pytest

from laminar.config.data_schema import ReasoningGymSource
from laminar.data.metadata import decode_metadata, encode_metadata
from laminar.data.reasoning_gym_source import ReasoningGymPrompts
from laminar.data.source import Entry
from laminar.rewards.reasoning_gym_reward import ReasoningGymReward


def gym(*names: str) -> ReasoningGymSource:
    datasets = [{"name": name} for name in names]
    return ReasoningGymSource.model_validate({"type": "reasoning_gym", "datasets": datasets})


def score(reward: ReasoningGymReward, entry: Entry, response: str) -> float:
    metadata = decode_metadata(encode_metadata(entry.metadata))  # as it travels
    return reward(prompt=entry.question, response=response, answer=entry.answer, metadata=metadata, source=entry.source)


@pytest.mark.parametrize("name", ["spell_backward", "caesar_cipher", "countdown", "rearc", "complex_arithmetic"])
def test_the_generators_own_answer_gets_its_own_score(name: str) -> None:
    source = ReasoningGymPrompts(gym(name), 0)
    reward = ReasoningGymReward(gym(name))
    for position in range(5):
        entry = source.entry(position)
        assert score(reward, entry, entry.answer) == 1.0
        assert score(reward, entry, f"\n {entry.answer} ") == 1.0
        assert score(reward, entry, "no idea") < 0.5


def test_open_answers_are_scored_by_the_entrys_metadata() -> None:
    entry = ReasoningGymPrompts(gym("graph_color"), 0).entry(0)
    reward = ReasoningGymReward(gym("graph_color"))
    coloring = str(entry.metadata["possible_answer"]).replace("'", '"')
    assert entry.metadata["possible_answer"].keys() == {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}  # integers: JSON alone loses them
    quoted = "{" + ", ".join(f'"{node}": {color}' for node, color in entry.metadata["possible_answer"].items()) + "}"
    assert score(reward, entry, quoted) == 1.0
    assert score(reward, entry, coloring + "?") == 0.0


def test_each_component_of_a_mixture_scores_its_own() -> None:
    source = ReasoningGymPrompts(gym("chain_sum", "chain_sum", "spell_backward"), 0)
    reward = ReasoningGymReward(gym("chain_sum", "chain_sum", "spell_backward"))
    entries = [source.entry(position) for position in range(9)]
    assert {entry.source for entry in entries} == {"chain_sum[0]", "chain_sum[1]", "spell_backward"}
    assert [score(reward, entry, entry.answer) for entry in entries] == [1.0] * 9


def test_text_that_a_scorer_chokes_on_is_a_wrong_answer(caplog: pytest.LogCaptureFixture) -> None:
    entry = ReasoningGymPrompts(gym("prime_factorization"), 0).entry(0)
    reward = ReasoningGymReward(gym("prime_factorization"))
    with caplog.at_level(logging.WARNING):
        assert [score(reward, entry, "two times three") for _ in range(3)] == [0.0] * 3
    assert len(caplog.records) == 1
    assert "prime_factorization cannot score 'two times three'" in caplog.text
    damaged = Entry(source=entry.source, question=entry.question, answer="not factors", metadata=entry.metadata)
    with pytest.raises(ValueError, match="invalid literal"):
        score(reward, damaged, "two times three")

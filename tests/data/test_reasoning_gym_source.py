from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from laminar.config.data_schema import ReasoningGymSource
from laminar.data.reasoning_gym_source import CHUNK, ReasoningGymPrompts
from laminar.data.source import Entry
from laminar.errors import UserError


def open_gym(*names: str | dict[str, object], seed: int = 0, **keys: object) -> ReasoningGymPrompts:
    datasets = [{"name": name} if isinstance(name, str) else name for name in names]
    source = ReasoningGymSource.model_validate({"type": "reasoning_gym", "datasets": datasets, **keys})
    return ReasoningGymPrompts(source, seed)


def entries(source: ReasoningGymPrompts, positions: range) -> list[Entry]:
    return [source.entry(position) for position in positions]


def test_an_entry_depends_on_seed_and_position_alone() -> None:
    first = entries(open_gym("spell_backward", {"name": "chain_sum", "weight": 0.5}), range(60))
    source = open_gym("spell_backward", {"name": "chain_sum", "weight": 0.5})
    assert [source.entry(position) for position in reversed(range(60))] == first[::-1]
    assert sum(entry.source == "chain_sum" for entry in first) == 20
    assert len({entry.question for entry in first}) > 50
    other = entries(open_gym("spell_backward", {"name": "chain_sum", "weight": 0.5}, seed=1), range(60))
    assert not {entry.question for entry in first if entry.source == "chain_sum"} & {entry.question for entry in other}


def test_the_sources_own_seed_goes_before_the_experiments() -> None:
    source = {"type": "reasoning_gym", "datasets": [{"name": "chain_sum"}], "seed": 5}
    mine = ReasoningGymPrompts(ReasoningGymSource.model_validate(source), 1)
    assert mine.entry(0) == open_gym("chain_sum", seed=5).entry(0) != open_gym("chain_sum", seed=1).entry(0)


def test_a_finite_source_repeats_its_prompts_every_epoch() -> None:
    source = open_gym("chain_sum", prompts=7)
    assert source.size == 7
    assert entries(source, range(7)) == entries(source, range(7, 14)) == entries(source, range(70, 77))
    assert open_gym("chain_sum").size is None


def test_streams_go_on_without_repeats_over_chunks_and_far_out() -> None:
    source = open_gym("chain_sum", {"name": "chain_sum", "params": {"min_terms": 5, "max_terms": 6}})
    near = entries(source, range(2 * CHUNK - 20, 2 * CHUNK + 20))
    far = entries(source, range(10**9, 10**9 + 20))
    assert len({entry.question for entry in near + far}) == 60
    assert {entry.source for entry in near} == {"chain_sum[0]", "chain_sum[1]"}


@pytest.mark.parametrize("name", ["word_ladder", "acre", "gsm_symbolic"])
def test_generators_that_dislike_large_sizes_are_asked_lazily(name: str) -> None:
    assert open_gym(name).entry(123_456).question


def test_global_random_state_neither_matters_nor_changes() -> None:
    source = open_gym("list_functions")  # draws from Python's global generator
    random.seed(1)
    np.random.seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist())
    first = entries(source, range(30))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    random.seed(2)
    assert entries(source, range(30)) == first


def test_an_open_answer_is_marked() -> None:
    entry = open_gym("graph_color").entry(0)
    assert entry.answer == ""
    assert entry.metadata["answer_is_open"] is True


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match=r"data\.source\.datasets\[1\]\.name: .*'spell_backwards'.*spell_backward"):
        open_gym("chain_sum", "spell_backwards")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"min_word_length": 3},
            r"datasets\[0\]\.params: spell_backward has no parameter 'min_word_length'; .*min_word_len",
        ),
        ({"min_word_len": 9, "max_word_len": 3}, r"datasets\[0\]\.params: spell_backward refuses .*must be"),
        ({"min_word_len": "three"}, r"datasets\[0\]\.params: spell_backward refuses .*not supported between"),
        ({"seed": 3}, r"params\.seed: set data\.source\.seed instead"),
        ({"size": 3}, r"params\.size: set data\.source\.prompts instead"),
    ],
)
def test_bad_parameters_are_named_with_the_generators_own_words(params: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_gym({"name": "spell_backward", "params": params})


def test_a_generator_that_fails_later_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.algorithmic.spell_backward import SpellBackwardDataset

    def broken(self: object, index: int) -> dict[str, object]:
        raise IndexError("list index out of range")

    monkeypatch.setattr(SpellBackwardDataset, "__getitem__", broken)
    with pytest.raises(
        UserError, match=r"datasets\[0\] \(spell_backward\): entry 5 cannot be made .*list index out of"
    ):
        open_gym("spell_backward").entry(5)


def test_importing_the_source_imports_neither_reasoning_gym_nor_torch_and_reasoning_gym_no_torch() -> None:
    code = (
        "import sys, laminar.launch.check_data, laminar.data.open_source, laminar.rewards.registry\n"
        "assert not {'reasoning_gym', 'transformers', 'torch', 'sympy'} & sys.modules.keys()\n"
        "import reasoning_gym; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()})

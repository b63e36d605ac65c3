from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from laminar.config.schema import ExperimentConfig
from laminar.data.open_source import open_source, source_names, total_prompts
from laminar.data.source import Entry
from laminar.errors import UserError

GYM = {"type": "reasoning_gym", "datasets": [{"name": "chain_sum"}]}


def jsonl(path: Path, count: int) -> dict[str, Any]:
    path.write_text("".join(json.dumps({"prompt": f"{path.stem}{k}", "answer": "1"}) + "\n" for k in range(count)))
    return {"type": "jsonl", "path": str(path)}


def config(*sources: dict[str, Any], epochs: int = 1, seed: int = 0, **keys: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "test",
            "seed": seed,
            "model": {"path": "model"},
            "data": {"source": {"type": "mixture", "sources": list(sources), **keys}, "epochs": epochs},
            "reward": {"function": "exact"},
            "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )


def entries(experiment: ExperimentConfig, start: int, stop: int) -> list[Entry]:
    source = open_source(experiment)
    return [source.entry(position) for position in range(start, stop)]


def test_without_weights_an_epoch_serves_every_row_once(tmp_path: Path) -> None:
    experiment = config(
        {"source": jsonl(tmp_path / "a.jsonl", 7)}, {"source": jsonl(tmp_path / "b.jsonl", 3)}, epochs=3
    )
    source = open_source(experiment)
    assert (source.size, total_prompts(experiment, source)) == (10, 30)
    assert list(source_names(experiment)) == ["a.jsonl", "b.jsonl"]
    rows = sorted([f"a{k}" for k in range(7)] + [f"b{k}" for k in range(3)])
    for epoch in range(3):
        assert sorted(entry.question for entry in entries(experiment, 10 * epoch, 10 * epoch + 10)) == rows


def test_weights_spread_the_sources_evenly_over_their_own_epochs(tmp_path: Path) -> None:
    experiment = config(
        {"source": jsonl(tmp_path / "a.jsonl", 50), "weight": 1},
        {"source": jsonl(tmp_path / "b.jsonl", 4), "weight": 3},
        {"source": GYM, "weight": 4},
    )
    assert open_source(experiment).size is None
    made = entries(experiment, 0, 160)
    counts = Counter(entry.source for entry in made)
    assert (counts["a.jsonl"], counts["b.jsonl"], counts["chain_sum"]) == (20, 60, 80)
    served = [entry.question for entry in made if entry.source == "b.jsonl"]
    assert all(len(set(served[start : start + 4])) == 4 for start in range(0, 60, 4))  # each of its epochs is whole


def test_any_position_can_be_asked_for_as_a_resumed_run_does(tmp_path: Path) -> None:
    experiment = config(
        {"source": jsonl(tmp_path / "a.jsonl", 11), "weight": 1}, {"source": GYM, "weight": 1}, prompts=20, epochs=2
    )
    whole = entries(experiment, 0, 40)
    assert entries(experiment, 27, 40) == whole[27:]  # another process, from the cursor on
    backwards = open_source(experiment)
    assert [backwards.entry(position) for position in reversed(range(40))] == whole[::-1]
    other = experiment.model_copy(update={"seed": 1})
    assert entries(other, 0, 40) != whole


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", 3)
    with pytest.raises(
        UserError, match=r"data\.source\.sources\.1\.weight: missing; give all sources of a mixture a weight"
    ):
        open_source(config({"source": file, "weight": 1}, {"source": file}))
    with pytest.raises(UserError, match=r"data\.source\.sources\.1\.weight: missing; this source never ends"):
        open_source(config({"source": file}, {"source": GYM}))

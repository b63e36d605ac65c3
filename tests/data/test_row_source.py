from __future__ import annotations

import json
from pathlib import Path

from laminar.config.data_schema import JsonlSource
from laminar.data.open_source import open_single
from laminar.data.source import PromptSource


def numbered(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"question {k}", "answer": str(k)}) + "\n" for k in range(count)))
    return str(path)


def open_jsonl(path: str, seed: int = 0, **keys: object) -> PromptSource:
    return open_single(JsonlSource.model_validate({"type": "jsonl", "path": path, **keys}), seed, "data.source")


def test_each_epoch_is_a_new_permutation_of_all_rows(tmp_path: Path) -> None:
    path = numbered(tmp_path / "data.jsonl", 50)
    source = open_jsonl(path, seed=3)
    assert source.size == 50
    epochs = [[source.entry(50 * epoch + place).answer for place in range(50)] for epoch in range(3)]
    assert all(sorted(epoch, key=int) == [str(number) for number in range(50)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3

    again = open_jsonl(path, seed=3)
    assert [again.entry(position).answer for position in reversed(range(150))] == [
        answer for epoch in epochs for answer in epoch
    ][::-1]
    other = open_jsonl(path, seed=4)
    assert [other.entry(place).answer for place in range(50)] != epochs[0]
    own = open_single(JsonlSource(type="jsonl", path=path, seed=3), 4, "data.source")
    assert [own.entry(place).answer for place in range(50)] == epochs[0]


def test_without_shuffle_epochs_keep_the_files_order(tmp_path: Path) -> None:
    source = open_jsonl(numbered(tmp_path / "data.jsonl", 3), shuffle=False)
    assert [source.entry(position).answer for position in range(7)] == ["0", "1", "2", "0", "1", "2", "0"]


def test_entries_are_called_after_the_file_or_as_the_user_says(tmp_path: Path) -> None:
    path = numbered(tmp_path / "data.jsonl", 1)
    assert open_jsonl(path).entry(0).source == "data.jsonl"
    assert open_jsonl(path, name="sums").entry(0).source == "sums"

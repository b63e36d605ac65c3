from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laminar.config.data_schema import HuggingFaceSource, ParquetSource
from laminar.data.metadata import decode_metadata, encode_metadata
from laminar.data.open_source import open_rows, open_single
from laminar.errors import UserError


def write(path: Path, start: int, stop: int, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = range(start, stop)
    rows = {"prompt": [f"q{n}" for n in numbers], "answer": [str(n) for n in numbers], **columns}
    pq.write_table(pa.table(rows), path, row_group_size=2)
    return path


def parquet(path: Path, **keys: Any) -> ParquetSource:
    return ParquetSource.model_validate({"type": "parquet", "path": str(path), **keys})


def hugging_face(path: Path, **keys: Any) -> HuggingFaceSource:
    return HuggingFaceSource.model_validate({"type": "hugging_face", "path": str(path), **keys})


def test_a_parquet_file_with_nested_columns(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": f"m{n}"}] for n in range(3)]
    path = write(tmp_path / "train.parquet", 0, 3, info=[{"index": n, "tags": ["a"]} for n in range(3)], chat=messages)
    rows = open_rows(parquet(path), "data.source")
    assert (len(rows), rows.title, rows.columns) == (3, "train.parquet", ["prompt", "answer", "info", "chat"])
    assert rows.row(2)["info"] == {"index": 2, "tags": ["a"]}
    assert rows.where(2) == f"{path}, row 3"
    entry = open_single(parquet(path, prompt_field="chat", shuffle=False), 0, "data.source").entry(1)
    assert (entry.question, entry.answer, entry.source) == ("m1", "1", "train.parquet")


def test_columns_of_kinds_that_json_does_not_know_reach_rewards(tmp_path: Path) -> None:
    at = datetime(2024, 2, 29, 12)
    path = write(tmp_path / "train.parquet", 0, 1, image=[b"\x89PNG"], at=[at], cost=[Decimal("1.50")])
    entry = open_single(parquet(path), 0, "data.source").entry(0)
    assert decode_metadata(encode_metadata(entry.metadata)) == {"image": b"\x89PNG", "at": at, "cost": Decimal("1.50")}


def test_shards_are_one_source_in_the_order_of_their_names(tmp_path: Path) -> None:
    for shard in (1, 0, 2):
        write(tmp_path / f"part-{shard}.parquet", 3 * shard, 3 * shard + 3)
    source = open_single(parquet(tmp_path, shuffle=False), 0, "data.source")
    assert [source.entry(position).answer for position in range(10)] == [*map(str, range(9)), "0"]
    shuffled = open_single(parquet(tmp_path), 0, "data.source")
    assert sorted(shuffled.entry(position).answer for position in range(9)) == [*map(str, range(9))]


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    splits = {
        name: datasets.Dataset.from_dict({"prompt": [f"{name}{n}" for n in range(5)], "answer": list(range(5))})
        for name in ("train", "test")
    }
    splits["train"] = splits["train"].shuffle(seed=1)  # save_to_disk writes the rows in this order
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both", num_shards={"train": 2, "test": 1})
    splits["test"].save_to_disk(tmp_path / "single")
    rows = open_rows(hugging_face(tmp_path / "both", split="train"), "data.source")
    assert [rows.row(index) for index in range(5)] == list(splits["train"])
    assert len(open_rows(hugging_face(tmp_path / "single"), "data.source")) == 5
    with pytest.raises(UserError, match=r"data\.source\.split: missing; .*both has the splits train, test: choose one"):
        open_rows(hugging_face(tmp_path / "both"), "data.source")
    with pytest.raises(UserError, match=r"data\.source\.split: tets; .*splits train, test; did you mean test\?"):
        open_rows(hugging_face(tmp_path / "both", split="tets"), "data.source")


def test_parquet_shards_as_on_the_hub(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / "main" / f"{name}.parquet", 0, 2)
    assert len(open_rows(hugging_face(tmp_path, split="train"), "data.source")) == 4
    write(tmp_path / "socratic" / "train-00000-of-00001.parquet", 0, 2)
    with pytest.raises(UserError, match=r"several data sets \(.*main, .*socratic\); set it to one of these"):
        open_rows(hugging_face(tmp_path, split="train"), "data.source")
    assert len(open_rows(hugging_face(tmp_path / "socratic"), "data.source")) == 2


def test_files_and_folders_that_are_none(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.parquet"
    damaged.write_text("no parquet")
    cases = [
        (parquet(damaged), r"data\.source\.path: cannot read .*damaged\.parquet as Parquet: "),
        (parquet(tmp_path / "missing"), r"data\.source\.path: .*missing: there is no such file or folder"),
        (parquet(write(tmp_path / "empty.parquet", 0, 0)), r"data\.source\.path: empty\.parquet holds no rows"),
        (hugging_face(tmp_path / "missing"), r"data\.source\.path: .*missing: there is no such folder"),
        (
            hugging_face(tmp_path / "bare"),
            r"neither a folder that save_to_disk wrote .* nor one with \*\.parquet files",
        ),
    ]
    (tmp_path / "bare").mkdir()
    for source, message in cases:
        with pytest.raises(UserError, match=message):
            open_rows(source, "data.source")
    write(tmp_path / "mixed" / "a.parquet", 0, 1)
    write(tmp_path / "mixed" / "b.parquet", 0, 1, more=[1])
    with pytest.raises(
        UserError, match=r"b\.parquet has the columns prompt, answer, more, but .*a\.parquet has prompt, answer"
    ):
        open_rows(parquet(tmp_path / "mixed"), "data.source")

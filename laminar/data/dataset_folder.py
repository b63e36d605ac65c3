"""Which files of a folder a data set consists of.

Invariant: the files come in the order of their names, so every process sees the same rows in the same order; where a folder
leaves a choice, the user is asked for it.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from laminar.errors import UserError

_SHARD = re.compile(r"(?P<split>.+?)(?:-\d+-of-\d+.*|[._-]\d+)?\.parquet")


def parquet_files(path: Path, key: str) -> list[Path]:
    """The file itself, or all Parquet files of a folder.

    Raises:
        UserError: there are none.
    """
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.parquet"))
    if not files:
        what = "holds no *.parquet files" if path.is_dir() else "there is no such file or folder"
        raise UserError(f"{key}.path: {path}: {what} (working directory: {Path.cwd()})")
    return files


def dataset_files(path: Path, split: str | None, key: str) -> list[Path]:
    """The files of one split of a Hugging Face data set: written by `save_to_disk`, or Parquet shards as on the hub.

    Raises:
        UserError: no such folder, no data in it, or several splits (or data sets) to choose from.
    """
    if not path.is_dir():
        raise UserError(f"{key}.path: {path}: there is no such folder (working directory: {Path.cwd()})")
    if (path / "dataset_dict.json").is_file():
        splits = list(_json(path / "dataset_dict.json", key)["splits"])
        return _saved(path / _choose(splits, split, path, key), key)
    if (path / "state.json").is_file():
        if split is not None and (written := _json(path / "state.json", key).get("_split")) != split:
            raise UserError(
                f"{key}.split: {split}; {path} holds one split only ({written or 'without a name'}); remove it"
            )
        return _saved(path, key)
    shards = sorted(path.rglob("*.parquet"))
    if not shards:
        raise UserError(
            f"{key}.path: {path}: neither a folder that save_to_disk wrote (dataset_dict.json or state.json) nor one with "
            "*.parquet files"
        )
    by_split: dict[str, list[Path]] = {}
    for shard in shards:
        match = _SHARD.fullmatch(shard.name)
        assert match is not None  # they all end in .parquet
        by_split.setdefault(match["split"], []).append(shard)
    chosen = by_split[_choose(list(by_split), split, path, key)]
    folders = sorted({shard.parent for shard in chosen})
    if len(folders) > 1:
        named = ", ".join(str(folder) for folder in folders)
        raise UserError(f"{key}.path: {path} holds several data sets ({named}); set it to one of these folders")
    return chosen


def _choose(splits: list[str], split: str | None, path: Path, key: str) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split in splits:
        return split
    if split is None:
        raise UserError(f"{key}.split: missing; {path} has the splits {', '.join(splits)}: choose one")
    near = difflib.get_close_matches(split, splits, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"{key}.split: {split}; {path} has the splits {', '.join(splits)}{hint}")


def _saved(folder: Path, key: str) -> list[Path]:
    """The Arrow files of one split, as its `state.json` lists them."""
    state = _json(folder / "state.json", key)
    return [folder / entry["filename"] for entry in state["_data_files"]]


def _json(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}.path: cannot read {path}: {error}") from error

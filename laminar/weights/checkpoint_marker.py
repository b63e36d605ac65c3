"""The marker of a checkpoint, its last file: of which step it is, and what all other files were when they were written.

Invariants: a marker that `read_marker` returns reads as it was written; a checkpoint of which `find_damage` finds none has every
file that the trainer wrote, each with the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laminar.errors import DamagedCheckpoint
from laminar.weights.checksum import checksum, file_checksum

MARKER = "complete.json"
FILES_AT_ONCE = 8
_OLD_KEYS = {"step", "policy_version", "state"}  # before there were checksums
_KEYS = _OLD_KEYS | {"files", "checksum"}


@dataclass(kw_only=True, slots=True, frozen=True)
class FileSum:
    """What a file was when it was written."""

    nbytes: int
    checksum: int


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointMarker:
    """Contents of the marker file."""

    step: int
    policy_version: int
    state: str  # JSON that the controller gave
    files: Mapping[str, FileSum] | None  # by path within the folder; None: written before there were checksums

    @property
    def nbytes(self) -> int:
        """Of all files; 0 where that was not written down."""
        return sum(file.nbytes for file in (self.files or {}).values())


def write_marker(folder: Path, marker: CheckpointMarker) -> None:
    """Write it down, durably. Raises OSError."""
    content = {
        "step": marker.step,
        "policy_version": marker.policy_version,
        "state": json.loads(marker.state or "null"),
        "files": {name: [file.nbytes, f"{file.checksum:016x}"] for name, file in sorted((marker.files or {}).items())},
    }
    with open(folder / MARKER, "w", encoding="utf-8") as file:
        json.dump(content | {"checksum": _own_checksum(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_marker(folder: Path) -> CheckpointMarker:
    """The marker of a complete checkpoint.

    Raises:
        DamagedCheckpoint: there is none, or it is not as it was written.
    """
    try:
        content = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if set(content) != _OLD_KEYS and (set(content) != _KEYS or content.pop("checksum") != _own_checksum(content)):
            raise ValueError("it is not as it was written")
        files = content.get("files")
        return CheckpointMarker(
            step=int(content["step"]),
            policy_version=int(content["policy_version"]),
            state=json.dumps(content["state"]),
            files=None if files is None else {name: _file_sum(*values) for name, values in files.items()},
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpoint(f"{folder} is not a complete checkpoint: it has no {MARKER}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{folder / MARKER} is damaged: {error}") from error


def sum_files(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """What these files of a folder are now, read from the disk. Raises OSError."""
    return {
        name: FileSum(nbytes=(folder / name).stat().st_size, checksum=file_checksum(folder / name)) for name in names
    }


def find_damage(
    folder: Path, files: Mapping[str, FileSum], on_bytes: Callable[[int], None] = lambda nbytes: None
) -> str:
    """The first of these files that is not what it was, and in what way; "" if all are.

    `on_bytes` hears of each piece that was read, from several threads.
    """
    for name, file in files.items():  # at once, before anything is read
        try:
            nbytes = (folder / name).stat().st_size
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read ({error})"
        if nbytes != file.nbytes:
            return f"{name} has {nbytes} bytes, it was written with {file.nbytes}"

    def damage(name: str) -> str:
        try:
            same = file_checksum(folder / name, on_bytes) == files[name].checksum
        except OSError as error:
            return f"{name} cannot be read ({error})"
        return "" if same else f"{name} has another checksum than it was written with"

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return next(filter(None, pool.map(damage, files)), "")


def _file_sum(nbytes: int, digest: str) -> FileSum:
    return FileSum(nbytes=nbytes, checksum=int(digest, 16))


def _own_checksum(content: Any) -> str:
    """Of the marker itself, without this."""
    return f"{checksum(np.frombuffer(json.dumps(content, sort_keys=True).encode(), np.uint8)):016x}"

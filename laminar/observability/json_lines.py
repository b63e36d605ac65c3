"""Files of JSON objects, one a line, that a reader may follow while they grow.

Invariant: a file holds whole lines only, also when the disk was full in between, and, as soon as it is opened again, when its
writer was killed within a line. Not a number and infinity, which JSON
does not know, are written as null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

LOOK_BYTES = 1 << 16  # at a time, for the last end of a line


class JsonLines:
    """Appends lines; what cannot be written is counted, and `on_error` hears of it."""

    def __init__(self, path: Path, on_error: Callable[[Path, OSError], None], *, array: bool = False) -> None:
        """Open for appending; nobody else may be writing to it. Raises OSError.

        `array`: as one JSON array with an entry a line, that lacks its end as long as the file may grow.
        """
        self.path = path
        self.lost = 0  # lines that could not be written
        self._on_error = on_error
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _cut_broken_line(self._file)
        self._end = b",\n" if array else b"\n"
        if array and os.fstat(self._file).st_size == 0:
            os.write(self._file, b"[\n")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; it is with the operating system when this returns."""
        self.write_all([line])

    def write_all(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines by one call of the operating system; what does not fit costs the last of them."""
        data = b"".join([_encoded(line) + self._end for line in lines])
        start = written = 0
        try:
            start = os.fstat(self._file).st_size
            while written < len(data):
                written += os.write(self._file, memoryview(data)[written:])
        except OSError as error:
            whole = data.rfind(b"\n", 0, written) + 1
            self.lost += data.count(b"\n", whole)
            self._take_back(start + whole)
            self._on_error(self.path, error)

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _take_back(self, size: int) -> None:
        """Remove the part of a line that still found room, so that the next line starts at a line's start."""
        try:
            if os.fstat(self._file).st_size > size:
                os.ftruncate(self._file, size)
        except OSError:
            self.close()  # then the file ends in a broken line, and no line follows it


def _cut_broken_line(file: int) -> None:
    """Remove what follows the last end of a line."""
    size = start = os.fstat(file).st_size
    end = 0  # of the last whole line, from `start`
    while start and not end:
        start = max(0, start - LOOK_BYTES)
        end = os.pread(file, LOOK_BYTES, start).rfind(b"\n") + 1
    if start + end < size:
        os.ftruncate(file, start + end)


def _encoded(line: Mapping[str, Any]) -> bytes:
    try:
        return _ENCODER.encode(line)
    except UnicodeEncodeError:  # half a surrogate pair, as in the name of a file that is not UTF-8
        return json.dumps(plain(line), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def plain(value: Any) -> Any:
    """The value in JSON's own types.

    Raises:
        TypeError: it holds something that JSON cannot express.
    """
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON: {value!r}")


# Some twenty times as fast as `json` with `plain`: a step of thousands of trajectories is written while the loop waits.
_ENCODER = msgspec.json.Encoder(enc_hook=plain)

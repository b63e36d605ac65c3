"""Rows of a JSON Lines file.

Invariant: the file is read once and every line is checked then; afterwards only the offsets of its lines are in memory
and a row is one seek and one read.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from laminar.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlRows:
    """`Rows` of a file with an object per line; blank lines are skipped."""

    def __init__(self, path: str, key: str) -> None:
        """Read the file once.

        Args:
            path: the file.
            key: of the configuration that names it, for messages.

        Raises:
            UserError: the file is missing or empty, or one of its lines is not an object.
        """
        self._path = path
        self._offsets = array("q")  # byte at which each row's line starts
        self._lines = array("q")  # its number, counted from 1
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - kept open: rows are read when they are asked for
            self._scan()
        except OSError as error:  # a folder opens, but does not read
            raise UserError(f"{key}: cannot read {path}: {error.strerror}") from error
        if not self._offsets:
            raise UserError(f"{key}: {path} holds no entries; expected one JSON object per line")

    @property
    def title(self) -> str:
        """Name of the file."""
        return Path(self._path).name

    @property
    def columns(self) -> list[str] | None:
        """None: every line has its own keys."""
        return None

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> dict[str, Any]:
        """The object in a line. Raises UserError naming file and line, should the file have changed."""
        self._file.seek(self._offsets[index])
        return self._parse(self._file.readline(), self._lines[index])

    def where(self, index: int) -> str:
        """file:line."""
        return f"{self._path}:{self._lines[index]}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _scan(self) -> None:
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.removeprefix(BYTE_ORDER_MARK).strip():
                self._parse(line, number)
                self._offsets.append(offset)
                self._lines.append(number)
            offset += len(line)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        where = f"{self._path}:{number}"
        try:
            value = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start} of the line)") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON: {error}. Expected one object per line") from error
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected a JSON object, got {kind_of(value)}")
        return value


def kind_of(value: Any) -> str:
    """A JSON value's kind, in words."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return "empty text" if value == "" else kinds.get(type(value), "a number")

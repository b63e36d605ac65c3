"""Prompts from a JSON Lines file.

Invariant: the file is read once and every line is checked then; afterwards only the offsets of its lines are in memory
and an entry is one seek and one read. Each epoch is a permutation of all lines, so each is served exactly once.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.config.schema import JsonlSource
from laminar.data.source import Entry, derive_seed
from laminar.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlPrompts:
    """A `PromptSource` over the lines of a file."""

    def __init__(self, config: JsonlSource, seed: int, check: Callable[[str, Entry], None] | None = None) -> None:
        """Read the file once.

        Args:
            config: `data.source`.
            seed: the experiment's seed, for the permutations.
            check: called with "file:line" and the entry of every line; raises UserError where it does not like one.

        Raises:
            UserError: the file is missing or empty, or one of its lines is not an entry.
        """
        self._config = config
        self._path = Path(config.path)
        self._seed = seed
        self._offsets = array("q")  # byte at which each entry's line starts
        self._lines = array("q")  # its number, counted from 1 (blank lines are skipped)
        self._permutation = lru_cache(maxsize=2)(self._permute)
        try:
            self._file = open(self._path, "rb")  # noqa: SIM115 - kept open: entries are read when they are asked for
        except OSError as error:
            raise UserError(f"data.source.path: cannot read {config.path}: {error.strerror}") from error
        self._scan(check)

    @property
    def size(self) -> int:
        """Number of entries in the file."""
        return len(self._offsets)

    def entry(self, position: int) -> Entry:
        """The entry at a position; with `shuffle` every epoch has its own order."""
        epoch, place = divmod(position, self.size)
        index = int(self._permutation(epoch)[place]) if self._config.shuffle else place
        self._file.seek(self._offsets[index])
        return self._parse(self._file.readline(), self._lines[index])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng(derive_seed(self._seed, "epoch", epoch)).permutation(self.size)

    def _scan(self, check: Callable[[str, Entry], None] | None) -> None:
        offset = 0
        try:
            for number, line in enumerate(self._file, start=1):
                if line.removeprefix(BYTE_ORDER_MARK).strip():
                    entry = self._parse(line, number)
                    if check is not None:
                        check(f"{self._config.path}:{number}", entry)
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
        except OSError as error:  # a folder opens, but does not read
            raise UserError(f"data.source.path: cannot read {self._config.path}: {error.strerror}") from error
        if not self._offsets:
            raise UserError(
                f"data.source.path: {self._config.path} holds no entries; expected one JSON object per line, for example "
                f"{json.dumps({self._config.prompt_field: 'What is 2 + 3?', self._config.answer_field: '5'})}"
            )

    def _parse(self, line: bytes, number: int) -> Entry:
        """The entry in a line. Raises UserError naming file and line."""
        where = f"{self._config.path}:{number}"
        try:
            value = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start} of the line)") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON: {error}. Expected one object per line") from error
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected a JSON object, got {kind_of(value)}")
        prompt_field, answer_field = self._config.prompt_field, self._config.answer_field
        if prompt_field not in value:
            keys = ", ".join(value) or "none"
            raise UserError(
                f"{where}: no key {prompt_field!r}; the keys are: {keys}. Set data.source.prompt_field to the prompt's"
            )
        question = value[prompt_field]
        if not isinstance(question, str) or not question:
            raise UserError(f"{where}: {prompt_field}: expected text that is not empty, got {kind_of(question)}")
        metadata = {key: item for key, item in value.items() if key not in (prompt_field, answer_field)}
        answer = self._answer(value.get(answer_field), where)
        return Entry(source=self._path.name, question=question, answer=answer, metadata=metadata)

    def _answer(self, value: Any, where: str) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return repr(value)
        raise UserError(
            f"{where}: {self._config.answer_field}: expected text or a number, got {kind_of(value)}. Under another key "
            "it may be anything: rewards get it as metadata"
        )


def kind_of(value: Any) -> str:
    """A JSON value's kind, in words."""
    kinds = {dict: "an object", list: "a list", str: "empty text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")

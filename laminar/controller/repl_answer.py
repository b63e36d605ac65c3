"""What a REPL command answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from laminar.observability.plain_text import Cell, table


class CommandError(Exception):
    """The command was not understood, or cannot be done; the text says what would be."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Answer:
    """For people, and in JSON's types for programs."""

    text: str
    data: Any


def rows_as_text(rows: list[dict[str, Cell]]) -> str:
    """A table whose header is the keys, which all rows share; empty for no rows."""
    return table(list(rows[0]), [list(row.values()) for row in rows]) if rows else ""

"""The line per step that a person reads: fixed columns, so that lines printed minutes apart stand below each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from laminar.observability.plain_text import short_number

SEPARATOR = "  "


@dataclass(kw_only=True, slots=True, frozen=True)
class Column:
    """One column; `value` makes its cell from a metrics line."""

    title: str
    width: int
    value: Callable[[Mapping[str, Any]], str]
    keep: int  # columns with the smallest number go first where the terminal is too narrow


def _number(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda line: format(line[key], form) if _given(line, key) else "-"


def _short(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda line: short_number(line[key]) if _given(line, key) else "-"


def _given(line: Mapping[str, Any], key: str) -> bool:
    return isinstance(line.get(key), int | float)


def _staleness(line: Mapping[str, Any]) -> str:
    return f"{_number('staleness_mean', '.2f')(line)}/{_number('staleness_max', 'd')(line)}"


def _kv(line: Mapping[str, Any]) -> str:
    return f"{100 * line['kv_utilization_mean']:.0f}%" if _given(line, "kv_utilization_mean") else "-"


class StepTable:
    """Header and rows for a run of `steps` steps, at most `width` characters wide (None: as wide as it gets)."""

    def __init__(self, steps: int, width: int | None) -> None:
        digits = len(str(steps))
        columns = [
            Column(title="step", width=max(4, 2 * digits + 1), value=lambda line: f"{line['step']}/{steps}", keep=10),
            Column(title="reward", width=7, value=_number("reward_mean", ".4f"), keep=9),
            Column(title="staleness", width=9, value=_staleness, keep=7),
            Column(title="gen tok/s", width=9, value=_short("generated_tokens_per_s"), keep=6),
            Column(title="train tok/s", width=11, value=_short("trained_tokens_per_s"), keep=3),
            Column(title="KV", width=4, value=_kv, keep=4),
            Column(title="buffer", width=6, value=_number("buffer_groups", ".0f"), keep=2),
            Column(title="mismatch_kl", width=11, value=_number("mismatch_kl", ".2e"), keep=5),
            Column(title="lr", width=8, value=_number("learning_rate", ".2e"), keep=1),
            Column(title="seconds", width=7, value=_number("step_s", ".2f"), keep=8),
        ]
        while width is not None and len(columns) > 1 and _total(columns) > width:
            columns.remove(min(columns, key=lambda column: column.keep))
        self.columns = columns

    def header(self) -> str:
        """The titles."""
        return SEPARATOR.join(column.title.rjust(column.width) for column in self.columns)

    def row(self, line: Mapping[str, Any]) -> str:
        """One step; a figure that the line lacks is shown as "-"."""
        return SEPARATOR.join(column.value(line).rjust(column.width) for column in self.columns)


def _total(columns: list[Column]) -> int:
    return sum(column.width for column in columns) + len(SEPARATOR) * (len(columns) - 1)

"""Text for people, as plain strings: aligned tables, short numbers, bars. Used by the terminal, the summary and the REPL.

Invariant: what `printable` returned cannot move a terminal's cursor or change its colours, whoever wrote it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

Cell = str | int | float | None

BLOCKS = " ▁▂▃▄▅▆▇█"


def printable(text: str) -> str:
    """The text with control characters other than line ends shown as escapes: it may come from data or from a model."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def one_line(text: str, width: int) -> str:
    """The text on one line of at most `width` characters; a cut is shown by dots."""
    line = printable(text.replace("\n", "\\n"))
    return line if len(line) <= width else line[: max(0, width - 3)] + "..."


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Columns under a header. Numbers stand right, texts left; None is shown as "-"."""
    rows = [list(row) for row in rows]
    left = [any(isinstance(row[k], str) for row in rows) for k in range(len(header))]
    lines = [list(header), *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    )


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """One `name  value` a line; the values stand below each other."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in pairs)


def _cell(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return printable(str(cell)).replace("\n", " ")


def short_number(value: float) -> str:
    """Four characters or so: 7, 0.25, 940, 12.3k, 1.2M."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.99995:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2f}"


def data_size(nbytes: float) -> str:
    """Bytes as a person says them: 940 B, 3.2 MB (decimal units)."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size * 0.9995:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 3 ms, 4.2 s, 3 min 05 s, 2 h 07 min."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 or seconds <= 0 else f"{seconds * 1000:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def percent(fraction: float) -> str:
    """A fraction in percent: 0.4 %, 12 %."""
    value = 100 * fraction
    return f"{value:.1f} %" if 0 < value < 1 else f"{value:.0f} %"


def bars(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """A bar chart of `height` lines, from the smallest to the largest value; more than `width` values are averaged."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return []
    count = min(width, len(finite))
    edges = [len(finite) * k // count for k in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    # The lowest bar keeps one eighth of a line, so that every value is seen.
    levels = [1 + round((height * 8 - 1) * ((mean - low) / (high - low) if high > low else 0.5)) for mean in means]
    return [
        "".join(BLOCKS[min(8, max(0, level - 8 * line))] for level in levels).rstrip()
        for line in reversed(range(height))
    ]

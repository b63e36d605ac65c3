"""Distributions of lengths in tokens: of responses and prompts.

Invariant: a distribution holds no random state. It maps standard normal numbers to lengths, so that whoever draws them can
correlate them and can draw them in any order.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from laminar.errors import UserError

NORMAL_P99 = 2.3263478740408408  # 99th percentile of the standard normal distribution


class Lengths(Protocol):
    """A distribution of lengths."""

    @property
    def maximum(self) -> int:
        """Tokens at which a longer one is cut."""

    def uncut(self, normal: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lengths before the cut, for standard normal numbers of any shape; larger numbers give no smaller lengths."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LogNormalLengths:
    """Log-normal by two of its percentiles; what is longer than `maximum` is cut there."""

    median: float
    p99: float
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.median < math.inf:
            raise UserError(f"lengths.median: {self.median}; expected a number of tokens, 1 at least")
        if not self.median <= self.p99 < math.inf:
            raise UserError(f"lengths.p99: {self.p99}; expected at least lengths.median ({self.median})")
        if self.maximum < 1:
            raise UserError(f"lengths.maximum: {self.maximum}; expected a number of tokens, 1 at least")

    def uncut(self, normal: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `Lengths`."""
        sigma = math.log(self.p99 / self.median) / NORMAL_P99
        result: NDArray[np.float64] = self.median * np.exp(sigma * normal)
        return result


class FileLengths:
    """The lengths of a file, each as likely as the others: one number a line, or one JSON array of numbers."""

    def __init__(self, path: str | Path, *, maximum: int | None = None) -> None:
        """Read the file.

        Args:
            maximum: where longer ones are cut; the longest of the file if not given.

        Raises:
            UserError: the file cannot be read, is empty, or has something else than a length in it.
        """
        self._sorted = np.sort(np.array(_read_lengths(Path(path)), np.float64))  # float64 [N]
        self.maximum = maximum if maximum is not None else int(self._sorted[-1])
        if self.maximum < 1:
            raise UserError(f"lengths.maximum: {maximum}; expected a number of tokens, 1 at least")

    def uncut(self, normal: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `Lengths`."""
        count = len(self._sorted)
        ranks = np.minimum((_normal_cdf(normal) * count).astype(np.int64), count - 1)
        result: NDArray[np.float64] = self._sorted[ranks]
        return result


@dataclass(kw_only=True, slots=True, frozen=True)
class Growth:
    """How lengths grow over training: by a share of the first step's, or of the step before's."""

    per_step: float = 0.0  # 0.01: one percent
    kind: Literal["linear", "geometric"] = "linear"

    def __post_init__(self) -> None:
        if not 0 <= self.per_step < math.inf:
            raise UserError(
                f"lengths.growth_per_step: {self.per_step}; expected 0 or more, such as 0.01 for one percent"
            )
        if self.kind not in ("linear", "geometric"):
            raise UserError(f"lengths.growth: {self.kind!r}; expected linear or geometric")

    def factor(self, steps_before: NDArray[np.int64]) -> NDArray[np.float64]:
        """What lengths are multiplied by after this many steps, same shape."""
        if self.kind == "linear":
            return 1 + self.per_step * steps_before.astype(np.float64)
        return np.power(1 + self.per_step, steps_before.astype(np.float64))


def cut(lengths: Lengths, uncut: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole tokens, 1 to `maximum`, same shape."""
    return np.clip(np.rint(uncut), 1, lengths.maximum).astype(np.int64)


def draw(lengths: Lengths, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Independent lengths, int64 [count], cut."""
    return cut(lengths, lengths.uncut(rng.standard_normal(count)))


def _normal_cdf(normal: NDArray[np.float64]) -> NDArray[np.float64]:
    flat = [0.5 * math.erfc(-value / math.sqrt(2)) for value in normal.ravel().tolist()]
    return np.array(flat, np.float64).reshape(normal.shape)


def _read_lengths(path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"workload.lengths.file: {path} cannot be read ({error}); expected a text file of lengths"
        ) from None
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except ValueError as error:
            raise UserError(
                f"workload.lengths.file: {path} is not JSON: {error}; expected an array of numbers"
            ) from None
        lengths = [_length(value, f"{path}, entry {number}") for number, value in enumerate(values, 1)]
    else:
        lengths = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                lengths.append(_length(_number(line.strip()), f"{path}, line {number}"))
    if not lengths:
        raise UserError(f"workload.lengths.file: {path} is empty; expected one length a line")
    return lengths


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _length(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 2**53 or value != int(value):
        raise UserError(
            f"workload.lengths.file: {where}: {str(value)[:40]!r}; expected a whole number of tokens, 1 at least"
        )
    return int(value)

r"""The reward `math_verify`: the response's last mathematical expression equals the answer.

Invariant: a response costs nothing but its own score. What math-verify cannot read in it, or not within memory, is a wrong
answer; its own time limit, which needs `signal.alarm` in a main thread, is off: the process that it runs in is given up when
the reward's limit has passed.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from laminar.data.layouts import last_boxed

MEMORY_BYTES = 1 << 30  # on top of what the process has; powers of powers would take all there is
MAX_CHARACTERS = 10_000  # of the end of a response, where its answer stands

LATEX, PLAIN = LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()

# They warn once per process that the time limit is off, which is the intention.
logging.getLogger("math_verify.utils").setLevel(logging.ERROR)


class MathVerifyReward:
    """Compares expressions with math-verify."""

    def __init__(self, *, boxed_only: bool) -> None:
        """`boxed_only`: look only into boxes."""
        self._boxed_only = boxed_only

    def __call__(self, *, response: str, answer: str) -> float:
        """1 if they are equal, else 0.

        Raises:
            ValueError: there is no expression in the answer.
        """
        gold = parse_answer(answer)
        if not gold:
            raise ValueError(f"math-verify finds no mathematical expression in the expected answer {answer[:80]!r}")
        try:
            with limited_memory(MEMORY_BYTES):
                found = self._find(response[-MAX_CHARACTERS:])
                return float(verify(gold, found, timeout_seconds=None))
        except (MemoryError, RecursionError, OverflowError):
            return 0.0

    def _find(self, response: str) -> list[Any]:
        """What the last box holds; where there is none, the last expression."""
        boxed = last_boxed(response)
        if boxed is not None:
            return _parse(f"\\boxed{{{boxed}}}", [LATEX])
        return [] if self._boxed_only else _parse(response, [LATEX, PLAIN])


def parse_answer(answer: str) -> list[Any]:
    r"""The expressions of an expected answer; one without `$` or `\boxed` is taken for LaTeX as a whole."""
    if any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\[")):
        return _parse(answer, [LATEX, PLAIN])
    return _parse(f"\\boxed{{{answer}}}", [LATEX]) or _parse(answer, [PLAIN])


def _parse(text: str, targets: list[Any]) -> list[Any]:
    found: list[Any] = parse(text, targets, parsing_timeout=None)
    return found


@contextmanager
def limited_memory(extra: int) -> Iterator[None]:
    """Inside, this process may take so many bytes more than it has; above that an allocation is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    limit = taken + extra
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

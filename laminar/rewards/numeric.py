"""The reward `numeric`: the last number of the response equals the last number of the answer.

Invariant: numbers are compared as exact fractions, never as floats, and no response can make that slow.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

MAX_DIGITS = 1000  # longer ones equal nothing: int() is quadratic in the digits, and refuses past 4300

_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{\s*(-?\d+)\s*\}\{\s*(\d+)\s*\}")
_NUMBER = re.compile(
    r"""
    (?<![A-Za-z0-9_])(?<!\d\.)               # not inside a word, and not inside a number
    (?P<sign>(?<![A-Za-z0-9_)\]}.])[-+])?    # a sign only where it cannot be an operator: 5-3 ends in 3, =-3 in -3
    (?P<number>
        (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?   # 1,234,567.5 or 1234567.5 or 42
        |(?<!\.)\.\d+                        # .5, but not after an ellipsis
    )
    (?P<exponent>[eE][-+]?\d{1,3}(?!\d))?
    (?:/(?P<denominator>\d+)(?!\d|\.\d))?   # 3/4
    """,
    re.VERBOSE,
)


def last_number(text: str) -> Fraction | None:
    r"""The last number in a text, or None.

    - Integers, decimals (`.5`, `2.50`), exponents of up to three digits (`1e-3`), fractions of integers (`3/4`), LaTeX
      `\frac{3}{4}`; commas between groups of three digits are skipped (`1,234`).
    - A minus right before the digits belongs to the number unless a letter, a digit or a closing bracket stands before
      it. U+2212 is a minus.
    - Units, currency signs, `%`, `*`, `$`, a full stop after it: ignored (`50%` is 50).
    - Digits inside a word (`x2`, `H2O`) are no number. A number of more than 1000 characters, or with the denominator
      0, counts as the last one but has no value: None.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    last = deque(_NUMBER.finditer(_LATEX_FRACTION.sub(r"\1/\2", text)), maxlen=1)
    if not last or len(last[0].group()) > MAX_DIGITS:
        return None
    found = last[0]
    value = Fraction(found["number"].replace(",", "") + (found["exponent"] or ""))
    if found["denominator"] is not None:
        denominator = int(found["denominator"])
        if denominator == 0:
            return None
        value /= denominator
    return -value if found["sign"] == "-" else value


def numeric_reward(*, response: str, answer: str) -> float:
    """1 if the response's last number equals the answer's last number, else 0; see `last_number` for what is one.

    Raises:
        ValueError: there is no number in the answer.
    """
    expected = last_number(answer)
    if expected is None:
        raise ValueError(f"the expected answer {answer[:80]!r} holds no number; use reward.function: exact for text")
    return 1.0 if last_number(response) == expected else 0.0

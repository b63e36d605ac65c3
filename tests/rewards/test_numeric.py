from __future__ import annotations

from fractions import Fraction

import pytest

from laminar.rewards.numeric import last_number, numeric_reward


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", "42"),
        ("The answer is 42.", "42"),
        ("first 1, then 2, at last 3", "3"),
        ("$1,234,567.50", "1234567.5"),
        ("1,2345", "2345"),
        ("1,2,3", "3"),
        (".5", "0.5"),
        ("is: .25!", "0.25"),
        ("007", "7"),
        ("-3", "-3"),
        ("x = -3", "-3"),
        ("x=-3", "-3"),
        ("(-3)", "-3"),
        ("+3", "3"),
        ("\u22123", "-3"),
        ("5-3", "3"),
        ("f(x)-3", "3"),
        ("5 - 3", "3"),
        ("3/4", "3/4"),
        ("3/4.", "3/4"),
        ("-3/4", "-3/4"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"$-\dfrac{1}{2}$", "-1/2"),
        (r"\frac{-1}{2}", "-1/2"),
        ("1e-3", "0.001"),
        ("2.5E+2", "250"),
        ("50%", "50"),
        ("10km", "10"),
        ("**17**", "17"),
        ("#### 72", "72"),
        ("... 9", "9"),
        ("...9", "9"),
        ("version 1.2.3", "1.2"),
        ("7 of x2", "7"),
        ("答案是42。", "42"),
        ("1e5000", "1"),
    ],
)
def test_last_number(text: str, value: str) -> None:
    assert last_number(text) == Fraction(value)


@pytest.mark.parametrize("text", ["", "none", "x2", "H2O", "1/0", "9" * 5000, "3 then " + "1" * 1001])
def test_no_number(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("It is 0.50", "1/2", 1.0),
        ("12,000", "12000", 1.0),
        ("5 apples and 7 pears: 12", "5 + 7\n#### 12", 1.0),
        ("12 in all, 5 are apples", "12", 0.0),
        ("0.30000000000000004", "0.3", 0.0),
        ("12345678901234567891", "12345678901234567890", 0.0),
        ("-3", "3", 0.0),
        ("I do not know", "3", 0.0),
        ("", "3", 0.0),
        ("1/0", "3", 0.0),
    ],
)
def test_numeric_reward(response: str, answer: str, reward: float) -> None:
    assert numeric_reward(response=response, answer=answer) == reward


def test_an_answer_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="'blue' holds no number; use reward.function: exact"):
        numeric_reward(response="3", answer="blue")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("piece", ["1", "1,", "1,111", "-", "1/", "1.", r"\frac{1", "1e", "\\frac{1}{2}", ". "])
def test_long_nonsense_takes_no_time(piece: str) -> None:
    assert numeric_reward(response=piece * 100_000, answer="3") == 0.0

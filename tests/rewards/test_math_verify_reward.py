from __future__ import annotations

import resource
import threading

import pytest

from laminar.rewards.math_verify_reward import MathVerifyReward, limited_memory, parse_answer

REWARD = MathVerifyReward(boxed_only=False)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is $\\boxed{42}$.", "42"),
        ("So x = 0.5", "\\frac{1}{2}"),
        ("Thus \\boxed{\\frac{2}{4}}", "$\\frac{1}{2}$"),
        ("\\boxed{3/4}", "0.75"),
        ("The sum is 1,234.", "1234"),
        ("$\\boxed{x^2 + 2x + 1}$", "(x+1)^2"),
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}"),
        ("\\boxed{(1, \\pi)}", "(1,\\pi)"),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}"),
        ("first \\boxed{1}, at last \\boxed{070}", "70"),
    ],
)
def test_equal_expressions(response: str, answer: str) -> None:
    assert REWARD(response=response, answer=answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("\\boxed{41}", "42"),
        ("no idea", "42"),
        ("", "42"),
        ("\\boxed{}", "42"),
        ("\\boxed{\\frac{1}{", "42"),
        ("\\boxed{" + "(" * 5000, "42"),
        ("\\boxed{(2, 1)}", "(1, 2)"),
    ],
)
def test_other_expressions_and_none(response: str, answer: str) -> None:
    assert REWARD(response=response, answer=answer) == 0.0


def test_only_what_is_boxed() -> None:
    reward = MathVerifyReward(boxed_only=True)
    assert reward(response="It is 42.", answer="42") == 0.0
    assert reward(response="It is \\boxed{42}, not 41.", answer="42") == 1.0


def test_an_answer_that_cannot_be_parsed_is_an_error_and_names_it() -> None:
    assert parse_answer("") == []
    with pytest.raises(ValueError, match=r"no mathematical expression in the expected answer ''"):
        REWARD(response="1", answer="")


def test_memory_is_bounded_and_the_bound_taken_away_again() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), limited_memory(1 << 28):
        bytearray(1 << 29)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_outside_the_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(REWARD(response="\\boxed{42}", answer="42")))
    thread.start()
    thread.join()
    assert scores == [1.0]

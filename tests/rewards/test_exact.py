from __future__ import annotations

import pytest

from laminar.rewards.exact import exact_reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("sun", "sun", 1.0),
        ("  a \n b\t", "a b", 1.0),
        ("a b", "a\n\nb ", 1.0),
        ("", "  ", 1.0),
        ("Sun", "sun", 0.0),
        ("sun.", "sun", 0.0),
        ("ab", "a b", 0.0),
        ("the sun", "sun", 0.0),
    ],
)
def test_exact(response: str, answer: str, reward: float) -> None:
    assert exact_reward(response=response, answer=answer) == reward

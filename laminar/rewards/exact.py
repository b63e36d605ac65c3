"""The reward `exact`: the response is the answer, white space aside."""

from __future__ import annotations


def exact_reward(*, response: str, answer: str) -> float:
    """1 if both are the same text once white space at the ends is gone and every run of it is one space, else 0.

    Upper and lower case, punctuation and Unicode forms count.
    """
    return 1.0 if " ".join(response.split()) == " ".join(answer.split()) else 0.0

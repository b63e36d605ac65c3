"""How much longer a trajectory will go on, judged by those that have finished. Pure.

Invariant: an estimate depends on the newest finished lengths alone, and never exceeds what the limit on responses leaves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

WINDOW = 2048  # newest finished responses


class ResponseLengths:
    """What is left, given what is there."""

    def __init__(self, limit: int) -> None:
        """`limit`: the longest response that is allowed, in tokens."""
        self._limit = limit
        self._newest: deque[int] = deque(maxlen=WINDOW)
        self._sorted: list[int] = []

    def finished(self, tokens: int) -> None:
        """A response ended with so many tokens."""
        self._newest.append(tokens)
        self._sorted = []

    def remaining(self, responses: Iterable[int]) -> int:
        """Tokens until the last of these responses will have ended, in the median; each is given by what it has.

        The last of n has ended by then with a chance of one half, so each of them by itself with one of 0.5^(1/n). Where none
        that finished was longer: as many tokens again as it has, which is how heavy tails behave.
        """
        if not self._sorted:
            self._sorted = sorted(self._newest)
        lengths = list(responses)
        share = 0.5 ** (1 / max(1, len(lengths)))
        return max((self._of_one(tokens, share) for tokens in lengths), default=0)

    def _of_one(self, tokens: int, share: float) -> int:
        """Tokens that this share of the longer ones had more at most."""
        left = max(0, self._limit - tokens)
        longer = len(self._sorted) - (first := bisect_right(self._sorted, tokens))
        if not longer:
            return min(left, tokens)
        return min(left, self._sorted[first + min(longer - 1, int(share * longer))] - tokens)

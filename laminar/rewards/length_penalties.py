"""Penalties for long responses: parts of a weighted sum, from 0 down to -1."""

from __future__ import annotations

from laminar.errors import UserError


class LinearPenalty:
    """0 up to `free` tokens, -1 from `longest` on, linear between.

    With free = longest - buffer it is DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).
    """

    def __init__(self, *, free: int, longest: int, key: str) -> None:
        """`key` names the options in the configuration.

        Raises:
            UserError: there is no slope between the two.
        """
        if not 0 <= free < longest:
            raise UserError(
                f"{key}: no room for a slope: nothing is to cost up to {free} tokens and -1 from {longest} on; expected at "
                "least 0 and below the second"
            )
        self._free = free
        self._longest = longest

    def __call__(self, *, num_tokens: int) -> float:
        """The penalty of a response of so many tokens."""
        return -min(1.0, max(0.0, (num_tokens - self._free) / (self._longest - self._free)))

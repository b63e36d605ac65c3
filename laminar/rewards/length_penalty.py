"""The reward `length_penalty`: what a long response costs; a part of a weighted sum, from 0 down to -1."""

from __future__ import annotations

from laminar.errors import UserError


class LengthPenalty:
    """0 up to `free` tokens, -1 from `longest` on, linear between."""

    def __init__(self, *, free: int, longest: int, key: str) -> None:
        """`key` names the option in the configuration.

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

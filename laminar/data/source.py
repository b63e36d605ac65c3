"""What every source of prompts offers: the entry at a position of the data order.

Invariant: `entry(position)` is a pure function of the configuration, the seed and the position. So every environment
worker gives the same answer, and a cursor is all that a resumed run needs to know of the data.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(kw_only=True, slots=True, frozen=True)
class Message:
    """One message of a conversation."""

    role: str  # "system", "user", "assistant"
    content: str


@dataclass(kw_only=True, slots=True, frozen=True)
class Entry:
    """One prompt before it becomes tokens."""

    source: str  # data set that it came from, for example "spell_backward"
    question: str  # the prompt's text, before `data.prompt_template`
    answer: str  # expected answer; "" where there is none
    history: tuple[Message, ...] = ()  # messages before it, where the data holds conversations
    metadata: dict[str, Any] = field(default_factory=dict)  # all else that the data says about it


class PromptSource(Protocol):
    """Prompts in a fixed order that may go on for several epochs."""

    @property
    def size(self) -> int | None:
        """Prompts in one epoch; None when the source never ends."""
        ...

    def entry(self, position: int) -> Entry:
        """The entry at a position, counted from 0 over all epochs.

        Raises:
            UserError: the data's entry cannot be read or made.
        """
        ...


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**31) from a tuple of names and numbers: the same on every machine, unrelated for unlike tuples."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1

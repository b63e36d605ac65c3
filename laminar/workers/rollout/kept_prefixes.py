"""What free slots of the torch engine's cache still hold: trajectories that have ended a turn and may come back for another.

Invariant: a slot is known here only while no trajectory runs in it and its first positions hold the KV of exactly the tokens
that are noted for it, made by the weights that the model has now.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laminar.workers.rollout.slot_cache import SlotCache


@dataclass(slots=True, frozen=True)
class _Kept:
    token_ids: NDArray[np.int32]  # [n], of the slot's first n positions
    age: int  # lower is older


class KeptPrefixes:
    """The prefix cache of the torch engine; as large as there are free slots, the oldest makes room."""

    def __init__(self, cache: SlotCache, slots: int) -> None:
        """Know nothing of any of the `slots`."""
        self._cache = cache
        self._slots = slots
        self._kept: dict[int, _Kept] = {}  # by slot
        self._ages = itertools.count()

    def keep(self, slot: int, token_ids: NDArray[np.int32]) -> None:
        """The slot has become free, and holds these tokens, int32 [n]."""
        self._kept[slot] = _Kept(token_ids, next(self._ages))

    def clear(self) -> None:
        """The weights have changed."""
        self._kept.clear()

    def longest(self, context: NDArray[np.int32], least: int) -> tuple[int, int] | None:
        """(slot, tokens) that holds most of this context, int32 [n]: at least `least` tokens, and never the last; or None."""
        found = [(_shared(kept.token_ids, context), slot) for slot, kept in self._kept.items()]
        tokens, slot = max(found, default=(0, -1))
        return (slot, tokens) if tokens >= max(least, 1) else None

    def bring(self, source: int, slot: int) -> None:
        """Have what `source` holds in `slot`, the first free one, which a trajectory takes now."""
        moved = self._kept.pop(source)
        if source == slot:
            return
        other = self._kept.pop(slot, None)
        if other is None:
            self._cache.move(source, slot, len(moved.token_ids))
        else:
            self._cache.swap(source, slot, len(moved.token_ids), len(other.token_ids))
            self._kept[source] = other

    def make_room(self, first: int, count: int) -> None:
        """The slots from `first` on are taken: what they hold goes to free slots, in place of nothing or of what is older."""
        taken = range(first, first + count)
        for slot in taken:
            moved = self._kept.pop(slot, None)
            if moved is None:
                continue
            empty = (free for free in range(taken.stop, self._slots) if free not in self._kept)
            place = next(empty, None)
            if place is None:
                others = [(kept.age, other) for other, kept in self._kept.items() if other not in taken]
                age, oldest = min(others, default=(moved.age, slot))
                if age >= moved.age:
                    continue
                place = oldest
            self._cache.move(slot, place, len(moved.token_ids))
            self._kept[place] = moved


def _shared(kept: NDArray[np.int32], context: NDArray[np.int32]) -> int:
    """Tokens from the start that both have, without the last of the context: its logits are wanted."""
    most = min(len(kept), len(context) - 1)
    other = np.flatnonzero(kept[:most] != context[:most])
    return int(other[0]) if len(other) else most

"""Numbers the trainer's orders, and writes each down before a rank hears of it.

Invariants: one order at a time is unanswered; a version is ordered once, unless its order is given again in the same words.
"""

from __future__ import annotations

from itertools import count
from typing import Literal

from laminar.controller.journal.journal import Journal, NoJournal
from laminar.controller.journal.restore import Restored
from laminar.controller.journal.trainer_order import TrainerOrder
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.protocol.messages import TrainerJoined
from laminar.trajectory import Group

ORDERS_PER_LIFE = 1 << 32  # of one controller: the next one's numbers are higher

Stand = Literal["as expected", "fresh", "unknown"]


class TrainerOrders:
    """Of one controller; knows what earlier ones have ordered."""

    def __init__(self, registry: WorkerRegistry, journal: Journal | NoJournal, restored: Restored | None) -> None:
        self.issued = -1 if restored is None else restored.issued  # newest version that a rank was ever told to publish
        self.unanswered = None if restored is None else restored.order  # by an earlier controller; given again first
        self._journal = journal
        self._last = 0 if restored is None else restored.last_order
        self._numbers = count(1 + ORDERS_PER_LIFE * (0 if restored is None else restored.life))
        self._joined: dict[str, int] = {}  # newest order of each rank that earlier controllers knew
        registry.handle(TrainerJoined, self._on_joined)

    def stand(self, ranks: list[str]) -> Stand:
        """Whether these ranks are those that earlier controllers drove, at the point that the journal tells of."""
        expected = {self._last} if self.unanswered is None else {self._last, self.unanswered.number}
        if all(self._joined.get(rank) in expected for rank in ranks):
            return "as expected" if self.unanswered is None or self.unanswered.kind != "load" else "unknown"
        return "fresh" if not any(self._joined.get(rank) for rank in ranks) else "unknown"

    async def publish(self, step: int, version: int) -> TrainerOrder:
        """The current weights, as this version."""
        return await self._give("publish", step, version=version)

    async def train(self, step: int, part: int, version: int | None, groups: list[Group]) -> TrainerOrder:
        """A step or a part of it, which publishes this version."""
        group_ids = tuple(group.group_id for group in groups)
        return await self._give("train", step, part=part, version=version, group_ids=group_ids)

    async def save(self, step: int) -> TrainerOrder:
        """A checkpoint; all that it stands on is on the disk first."""
        order = await self._give("save", step)
        await self._journal.durable()
        return order

    async def load(self, step: int) -> TrainerOrder:
        """Go back to a checkpoint."""
        return await self._give("load", step)

    async def _give(
        self,
        kind: Literal["publish", "train", "save", "load"],
        step: int,
        *,
        part: int = 0,
        version: int | None = None,
        group_ids: tuple[int, ...] = (),
    ) -> TrainerOrder:
        order = self.unanswered
        self.unanswered = None
        if order is None or (order.kind, order.step, order.part) != (kind, step, part):
            order = TrainerOrder(
                number=next(self._numbers),
                kind=kind,
                step=step,
                part=part,
                policy_version=version,
                group_ids=group_ids,
            )
        self.issued = max(self.issued, -1 if version is None else version)
        self._journal.note_order(order, self.issued)
        await self._journal.written()
        return order

    def answered(self, order: TrainerOrder) -> None:
        """All ranks have done it."""
        self._last = order.number
        self._journal.note_answered(order.number)

    def went_back(self, step: int) -> None:
        """The trainer stands at an earlier step: what had been ordered since is void."""
        self.unanswered = None
        self._journal.note_step(step)

    def _on_joined(self, worker: Worker, message: TrainerJoined) -> None:
        self._joined[worker.name] = message.order

    def forget_joined(self) -> None:
        """Its ranks are started anew."""
        self._joined.clear()

"""The controller's orders to a rank, and the rank's answers: each order is obeyed once, and answered as often as it is given.

Invariant: ranks stay in step whatever a controller's death has kept from some of them: one that lacks an order gets it from the
next controller, one that has it does not obey it again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from laminar.protocol.messages import TrainerJoined
from laminar.workers.worker import WorkerSession


class OrderBook:
    """A queue of orders that knows the newest."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._newest = 0
        self._answers: list[object] = []  # to the newest, so far
        session.on_rejoin = lambda: ([TrainerJoined(order=self._newest)], [])

    async def take(self, message: Any) -> None:
        """An order of the controller: queue it, or answer it again as far as it was answered."""
        if message.order > self._newest:
            self._newest, self._answers = message.order, []
            self._queue.put_nowait(message)
        elif message.order == self._newest:
            for answer in self._answers:
                await self._session.send(answer)

    async def answer(self, order: int, answer: object) -> None:
        """A part of what an order asked for is done."""
        if order == self._newest:
            self._answers.append(answer)
        await self._session.send(answer)

    async def get(self) -> Any:
        """The next order to obey; None at the end."""
        return await self._queue.get()

    def end(self) -> None:
        """No order will follow."""
        self._queue.put_nowait(None)

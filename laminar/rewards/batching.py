"""Calls that come one by one, answered many at once.

Invariant: a call waits only while a batch is being computed; then it goes with all that came meanwhile, up to the bound. An
error of a batch is not the error of its members: each is then computed alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Runs `compute` in a thread of its own, on one batch at a time."""

    def __init__(self, compute: Callable[[Sequence[Item]], Sequence[Result]], *, max_batch: int) -> None:
        """`compute` gives a result for each item, in order; it may raise."""
        self._compute = compute
        self._max_batch = max_batch
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batcher")
        self._running: asyncio.Task[None] | None = None
        self.batches: list[int] = []  # sizes of the newest ones
        self.kept = 100

    async def call(self, item: Item) -> Result:
        """The item's result; raises what `compute` raises for it alone."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="batches")
        return await future

    async def _run(self) -> None:
        """Compute until nobody waits."""
        await asyncio.sleep(0)  # whoever calls in the same turn of the loop goes with the first batch
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))]
            batch = [(item, future) for item, future in batch if not future.done()]  # the caller may have gone
            if batch:
                self.batches = [*self.batches[-self.kept :], len(batch)]
                await self._answer(batch)

    async def _answer(self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self._compute, [item for item, _ in batch])
        except Exception as error:  # whatever the model's code raises belongs to its caller
            if len(batch) == 1:
                _, future = batch[0]
                if not future.done():
                    future.set_exception(error)
                return
            for one in batch:
                await self._answer([one])
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

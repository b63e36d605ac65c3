"""The one thread in which everything runs that may take long or is not ours: generators, tokenizer, rewards.

Invariant: the worker's own loop never waits for that code without being able to do something else, so heartbeats go on
whatever it does. It is one thread, because generators and rewards may use global state (NumPy's random one, SymPy's).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class UserCodeThread:
    """A thread with an event loop of its own: plain functions run one after another, coroutines interleave."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: user code that never returns must not keep the process.
        self._thread = threading.Thread(target=self._loop.run_forever, name="user code", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Result of a plain function, run in the thread when what was asked before it is done."""

        async def coroutine() -> T:
            return function(*args, **kwargs)

        return await self.run(coroutine())

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Result of a coroutine, run in the thread's loop; cancelled there when the caller is."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def stop(self) -> None:
        """End the thread once the code that it is in returns."""
        self._loop.call_soon_threadsafe(self._loop.stop)

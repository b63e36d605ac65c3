"""The one thread in which everything runs that may take long or is not ours: generators, tokenizer, rewards.

Invariant: the worker's own loop never waits for that code without being able to do something else, so heartbeats go on
whatever it does. It is one thread, because generators and rewards may use global state (NumPy's random one, SymPy's); plain
methods of environments, which may block for as long as they like, are called beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
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


async def in_its_own_thread(function: Callable[..., T], *args: Any) -> T:
    """Result of a plain function that may block: nobody else waits for it.

    When the caller is cancelled the function goes on, and nobody hears of it; one that never returns keeps its thread.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    results: list[T] = []
    errors: list[BaseException] = []

    def end() -> None:
        if not ended.done():  # the caller has gone
            ended.set_result(None)

    def run() -> None:
        try:
            results.append(function(*args))
        except BaseException as error:  # sys.exit() too is for the caller to judge
            errors.append(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
            loop.call_soon_threadsafe(end)

    threading.Thread(target=run, name=getattr(function, "__qualname__", "plain function"), daemon=True).start()
    await ended
    if errors:
        raise errors[0]
    return results[0]

"""The one thread of a relay that calls MPI, and how the asyncio loop gives it work.

Invariants: jobs run one after another, in the order given; an idle thread is blocked in a queue and burns no CPU
(MPI's own blocking calls spin); the loop is never blocked.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from laminar.errors import UserError
from laminar.workers.relay.mpi_transport import MpiWorld

T = TypeVar("T")


class MpiThread:
    """Owns the `MpiWorld`. The thread is a daemon: the process does not wait for a job that hangs in MPI."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[MpiWorld], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._joined: asyncio.Future[MpiWorld] = self._loop.create_future()

    async def join_world(self, limit_s: float) -> MpiWorld:
        """Start the thread and wait until all relays are in the world. Only its plain attributes may be used here.

        Raises:
            UserError: there is no MPI library, or not all relays came within `limit_s` seconds.
        """
        threading.Thread(target=self._serve, name="mpi", daemon=True).start()
        try:
            return await asyncio.wait_for(self._joined, limit_s)
        except TimeoutError:
            raise UserError(
                f"the MPI world is not complete after {limit_s:.0f} s: a relay did not start; see the other relays' logs"
            ) from None

    async def run(self, job: Callable[[MpiWorld], T]) -> T:
        """Run `job` in the thread and return what it returns. The job has its own limit in time."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((job, future))
        return await future

    def _serve(self) -> None:
        try:
            world = MpiWorld()
        except Exception as error:  # belongs to whoever waits in join_world
            self._resolve(self._joined, None, error)
            return
        self._resolve(self._joined, world, None)
        while True:
            job, future = self._jobs.get()
            try:
                self._resolve(future, job(world), None)
            except Exception as error:  # belongs to whoever waits in run
                self._resolve(future, None, error)

    def _resolve(self, future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
        def settle() -> None:
            if future.done():  # the waiting task was cancelled
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)

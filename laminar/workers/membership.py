"""Whom a worker works for: the controller that the run directory names, and the next one when that is gone.

Invariants: a worker without a controller ends after `controller.grace_s`, and at once when the process that started it on this
machine has ended: nothing outlives its run. A controller's end is noticed at once on the same machine, elsewhere by
silence, or by another address in the run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.errors import UserError
from laminar.protocol.connection import RUN_ID_VARIABLE, Connection, boot_id, process_started
from laminar.protocol.zeromq import ZmqWorkerChannel

if TYPE_CHECKING:
    from laminar.workers.worker import WorkerSession

LOOK_S = 0.1  # between two looks for another controller in the run directory, which may be on a network's file system
FIRST_GRACE_S = 30.0  # for a worker that has not been let in yet, so that it does not know the config

log = logging.getLogger("laminar.worker")


class ControllerGone(Exception):
    """The controller has no use for this worker (any more), or is gone and no other has come: the worker ends."""


class ControllerLost(Exception):
    """The controller's process ended, or has been silent for too long; another may take its place."""


class Membership:
    """Keeps a session joined to whichever controller the run has."""

    def __init__(self, session: WorkerSession, path: Path, connection: Connection) -> None:
        """`path`: of the connection file, which held `connection` just now."""
        self._session = session
        self._path = path
        self._connection = connection
        self._channel: ZmqWorkerChannel | None = None

    async def keep(self) -> None:
        """Join, and join again whenever another controller comes.

        Raises:
            ControllerGone: no other has come in time, it does not want this worker, or the launcher's process has ended.
        """
        launcher = asyncio.create_task(self._watch_launcher(), name="watch the launcher's process")
        member = asyncio.create_task(self._keep_joined(), name="stay joined")
        try:
            done, _ = await asyncio.wait([launcher, member], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (launcher, member):
                task.cancel()
            await asyncio.gather(launcher, member, return_exceptions=True)

    def close(self) -> None:
        """Give the line back; queued messages get a moment to leave."""
        if self._channel is not None:
            self._channel.close()

    async def _keep_joined(self) -> None:
        while True:
            self._channel = ZmqWorkerChannel(self._connection, self._session.name)
            try:
                await self._serve_controller(self._channel)
            except ControllerLost as error:
                self._session.detach()
                self._channel.drop()
                self._channel = None
                self._connection = await self._another_controller(str(error))

    async def _serve_controller(self, channel: ZmqWorkerChannel) -> None:
        """Raises ControllerLost when it is gone."""
        watch = asyncio.create_task(
            watch_process(self._connection, self._connection.controller_pid, self._connection.controller_started),
            name="watch the controller's process",
        )
        member = asyncio.create_task(self._be_member(channel), name="member")
        try:
            done, _ = await asyncio.wait([watch, member], return_when=asyncio.FIRST_COMPLETED)
            if watch in done:
                raise ControllerLost(f"the controller (process {self._connection.controller_pid}) ended")
            member.result()
        finally:
            for task in (watch, member):
                task.cancel()
            await asyncio.gather(watch, member, return_exceptions=True)

    async def _be_member(self, channel: ZmqWorkerChannel) -> None:
        await self._session.join(channel)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._session.receive_forever(channel), name="receive"),
            asyncio.create_task(self._session.heartbeat_forever(self._is_replaced), name="heartbeat"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _is_replaced(self) -> bool:
        return self._read_other() is not None

    def _read_other(self) -> Connection | None:
        """What the file says now, if it is another controller of the same run."""
        with contextlib.suppress(UserError, OSError):
            found = Connection.read(self._path)
            if found != self._connection and found.run_id == self._connection.run_id:
                return found
        return None

    async def _another_controller(self, reason: str) -> Connection:
        joined = self._session.joined.is_set()
        grace_s = self._session.config.controller.grace_s if joined else FIRST_GRACE_S
        log.warning("%s: %s; going on without one for up to %g s", self._session.name, reason, grace_s)
        try:
            async with asyncio.timeout(grace_s):
                while (found := self._read_other()) is None:  # noqa: ASYNC110 - nothing tells of a file's change on every file system
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise ControllerGone(f"{reason}, and no other has come within {grace_s:g} s (controller.grace_s)") from None
        log.info("%s: joining the controller at %s", self._session.name, found.address)
        return found

    async def _watch_launcher(self) -> None:
        """Ends never for a worker that was started by hand, or on another machine."""
        connection = self._connection
        if RUN_ID_VARIABLE not in os.environ or not connection.launcher_pid:
            await asyncio.Event().wait()
        await watch_process(connection, connection.launcher_pid, connection.launcher_started)
        raise ControllerGone(f"the process that started it ({connection.launcher_pid}) ended")


async def watch_process(connection: Connection, pid: int, started: int) -> None:
    """Return as soon as a process of the controller's machine has ended; on another machine never."""
    if connection.boot_id != boot_id():
        await asyncio.Event().wait()
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    set_once: Callable[[], None] = lambda: None if gone.done() else gone.set_result(None)  # noqa: E731
    try:
        if process_started(pid) == started:
            loop.add_reader(fd, set_once)
            await gone
    finally:
        loop.remove_reader(fd)
        os.close(fd)

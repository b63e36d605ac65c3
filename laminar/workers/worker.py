"""What all workers share: dial the controller, say hello, heartbeat, and never outlive the run.

A worker is a coroutine `serve(session)`. It ends when the controller says so, when there has been none for
`controller.grace_s` (`membership.py`), or when it fails; then the process ends within `EXIT_LIMIT_S`, whatever its
threads are doing. While there is no controller it goes on with what it has.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

import laminar
from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError
from laminar.protocol.channel import WorkerChannel
from laminar.protocol.connection import CONNECTION_FILE, LOG_DIR_VARIABLE, Connection
from laminar.protocol.messages import Heartbeat, Hello, Progress, Ready, Shutdown, Welcome, WorkerFailed, WorkerKind
from laminar.workers.membership import ControllerGone, ControllerLost, Membership

WELCOME_LIMIT_S = 60.0
EXIT_LIMIT_S = 6.0

log = logging.getLogger("laminar.worker")

Serve = Callable[["WorkerSession"], Awaitable[None]]


class WorkerSession:
    """One worker's membership in a run: its configuration and its line to the controller, whichever that is."""

    def __init__(self, kind: WorkerKind, index: int) -> None:
        self.kind = kind
        self.index = index
        self.name = f"{kind}-{index}"
        self.welcome: Welcome
        self.config: ExperimentConfig
        # Called at the first SIGTERM instead of ending at once, for a worker that hands over what it has.
        self.on_notice: Callable[[], None] | None = None
        self.joined = asyncio.Event()  # the run: `welcome` and `config` are there
        # What a controller that took another's place must be told before `Ready`, and what after it.
        self.on_rejoin: Callable[[], tuple[list[object], list[object]]] = lambda: ([], [])
        self._channel: WorkerChannel | None = None  # None: there is no controller at the moment
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._last_heard = 0.0
        self._detail: str | None = None  # what it said of itself when it was ready

    @property
    def attached(self) -> bool:
        """Whether there is a controller."""
        return self._channel is not None

    async def join(self, channel: WorkerChannel) -> None:
        """Say hello and wait to be let in.

        Raises:
            ControllerGone: no answer within WELCOME_LIMIT_S, or the controller does not want this worker.
        """
        await channel.send(
            Hello(
                kind=self.kind,
                index=self.index,
                pid=os.getpid(),
                host=socket.gethostname(),
                version=laminar.__version__,
            )
        )
        try:
            async with asyncio.timeout(WELCOME_LIMIT_S):
                answer = await channel.receive()
        except TimeoutError:
            raise ControllerGone(f"no answer from the controller within {WELCOME_LIMIT_S:.0f} s") from None
        if not isinstance(answer, Welcome):
            reason = answer.reason if isinstance(answer, Shutdown) else type(answer).__name__
            raise ControllerGone(f"the controller did not let {self.name} in: {reason}")
        self._last_heard = asyncio.get_running_loop().time()
        self._channel = channel
        if self._detail is not None:
            self._inbox.put_nowait(_REJOIN)
        if not self.joined.is_set():
            self.welcome = answer
            self.config = ExperimentConfig.model_validate_json(answer.config)
            self.joined.set()

    def detach(self) -> None:
        """There is no controller: what is sent from now on is dropped. `on_rejoin` is to make up for it."""
        self._channel = None

    async def send(self, message: object) -> None:
        """Send a message to the controller, if there is one."""
        if self._channel is not None:
            await self._channel.send(message)

    async def progress(self, text: str) -> None:
        """Tell the person at the terminal what the warm-up is doing."""
        log.info("%s", text)
        await self.send(Progress(text=text))

    async def ready(self, detail: str) -> None:
        """Tell the controller that work can come."""
        log.info("ready: %s", detail)
        self._detail = detail
        await self.send(Ready(detail=detail))

    async def messages(self) -> AsyncIterator[Any]:
        """What the controller sends, until it says `Shutdown`. Waits for as long as there is one, or may come one."""
        while True:
            message = await self._inbox.get()
            if isinstance(message, Shutdown):
                log.info("shutdown: %s", message.reason)
                return
            if message is _REJOIN:  # in line: whatever came before has been taken in
                before, after = self.on_rejoin()
                for part in (*before, Ready(detail=self._detail or ""), *after):
                    await self.send(part)
                continue
            yield message

    async def receive_forever(self, channel: WorkerChannel) -> None:
        """Take messages off the channel; heartbeats are only noted.

        Raises:
            ControllerGone: told to end before it was ready; what it is loading does not read messages.
        """
        loop = asyncio.get_running_loop()
        while True:
            message = await channel.receive()
            self._last_heard = loop.time()
            if isinstance(message, Shutdown) and self._detail is None:
                raise ControllerGone(f"told to end while starting: {message.reason}")
            if not isinstance(message, Heartbeat):
                self._inbox.put_nowait(message)

    async def heartbeat_forever(self, replaced: Callable[[], bool]) -> None:
        """Send heartbeats, and notice the controller's silence, or that another has taken its place.

        Raises:
            ControllerLost: nothing heard for `controller.silence_limit_s`, or `replaced()`.
        """
        loop = asyncio.get_running_loop()
        limit = self.config.controller.silence_limit_s
        while True:
            await self.send(Heartbeat())
            await asyncio.sleep(self.config.controller.heartbeat_s)
            silent = loop.time() - self._last_heard
            if silent > limit:
                raise ControllerLost(f"nothing heard from the controller for {silent:.0f} s")
            if replaced():
                raise ControllerLost("another controller has taken its place")


_REJOIN = object()  # in the inbox: a controller that took another's place has let the worker in


def _on_sigterm(session: WorkerSession, serving: asyncio.Future[None]) -> None:
    notice, session.on_notice = session.on_notice, None
    if notice is None:
        serving.cancel()
    else:
        notice()


async def _run(kind: WorkerKind, index: int, path: Path, connection: Connection, serve: Serve) -> int:
    """Exit status of one worker."""
    session = WorkerSession(kind, index)
    loop = asyncio.get_running_loop()
    member = Membership(session, path, connection)

    async def serve_when_joined() -> None:
        await session.joined.wait()
        await serve(session)

    serving = asyncio.create_task(serve_when_joined(), name="serve")
    loop.add_signal_handler(signal.SIGINT, serving.cancel)
    loop.add_signal_handler(signal.SIGTERM, _on_sigterm, session, serving)
    tasks = [serving, asyncio.create_task(member.keep(), name="membership")]
    status = 0
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except asyncio.CancelledError:
        log.info("%s: ended by a signal", session.name)
        status = 143
    except ControllerGone as error:
        log.warning("%s: %s; ending", session.name, error)
        status = 3
    except UserError as error:
        log.error("%s: %s", session.name, error)
        await session.send(WorkerFailed(error=str(error), user_error=True))
        status = 2
    except Exception as error:  # every failure of a worker's code must reach the controller by name
        log.exception("%s failed", session.name)
        await session.send(WorkerFailed(error=f"{type(error).__name__}: {error}", user_error=False))
        status = 1
    finally:
        for task in tasks:
            task.cancel()
        # The engine's clean-up runs inside `serve`; it may take a moment, but not for ever.
        _, unfinished = await asyncio.wait(tasks, timeout=EXIT_LIMIT_S)
        for task in unfinished:
            log.error("%s: %s did not end within %.0f s", session.name, task.get_name(), EXIT_LIMIT_S)
        member.close()
    return status


def _end_descendants() -> None:
    """SIGTERM to every process below this one: an engine that was still starting is not tied to its parent yet."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    below = children.get(os.getpid(), [])
    for pid in below:
        below += children.get(pid, [])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def run_worker(kind: WorkerKind, serve: Serve, *, index: int | None = None, argv: list[str] | None = None) -> None:
    """Main function of every worker module; does not return.

    Args:
        kind: what the worker is.
        serve: its work, given the session.
        index: its index where a launcher (torchrun, mpirun) has decided it; else `--index` is required.
        argv: command line, for tests.
    """
    parser = argparse.ArgumentParser(prog=f"python -m laminar.workers.{kind}.main", description=serve.__doc__)
    parser.add_argument("--connect", required=True, type=Path, help="run directory, or its connection.json")
    if index is None:
        parser.add_argument("--index", required=True, type=int, help=f"which {kind} this is, counted from 0")
    options = parser.parse_args(argv)
    number = options.index if index is None else index
    if log_dir := os.environ.get(LOG_DIR_VARIABLE):
        fd = os.open(Path(log_dir) / f"{kind}-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    path = options.connect / CONNECTION_FILE if options.connect.is_dir() else options.connect
    try:
        connection = Connection.read(path)
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_run(kind, number, path, connection, serve))
        _end_descendants()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Threads in foreign code (a forward pass, MPI) must not keep the process: leave without waiting for them.
        os._exit(status)

"""Which workers belong to the run, and the one loop that takes in what they say.

Invariant: a message is handled only if its sender said hello and was let in; whoever waits for an answer of a worker
that is lost is told so at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import laminar
from laminar.controller.waiting import within
from laminar.errors import RunFailed, UserError, WorkerLost
from laminar.observability.events import EventBus, Notice, WorkerJoined, WorkerProgress, WorkerReady
from laminar.protocol.channel import ControllerChannel, PeerGone
from laminar.protocol.codec import CodecError
from laminar.protocol.messages import Heartbeat, Hello, Progress, Ready, Shutdown, Welcome, WorkerFailed, WorkerKind


@dataclass(kw_only=True, slots=True)
class Worker:
    """One worker as the controller knows it."""

    name: str  # "rollout-0"
    kind: WorkerKind
    index: int
    peer: bytes
    pid: int
    host: str
    last_heard: float  # seconds on the controller's clock
    ready: bool = False
    detail: str = ""  # what it said last of itself


Handler = Callable[[Worker, Any], None]


class WorkerRegistry:
    """Handshake, heartbeats, dispatch of messages to handlers, and awaited answers."""

    def __init__(
        self,
        channel: ControllerChannel,
        events: EventBus,
        *,
        expected: Iterable[str],
        welcome: Callable[[WorkerKind, int], Welcome],
        heartbeat_s: float,
        silence_limit_s: float,
    ) -> None:
        self.workers: dict[str, Worker] = {}
        self.strangers = 0  # messages from peers that are not workers of this run
        self._channel = channel
        self._events = events
        self._expected = frozenset(expected)
        self._welcome = welcome
        self._heartbeat_s = heartbeat_s
        self._silence_limit_s = silence_limit_s
        self._by_peer: dict[bytes, Worker] = {}
        self._handlers: dict[type, Handler] = {}
        self._answers: dict[tuple[str, type], asyncio.Future[Any]] = {}
        self._changed = asyncio.Event()
        self._replaceable: dict[str, Callable[[Worker, str], None]] = {}

    def handle(self, message_type: type, handler: Handler) -> None:
        """Call `handler` for every message of this type that nobody awaits by `expect`."""
        self._handlers[message_type] = handler

    def on_lost(self, kind: str, callback: Callable[[Worker, str], None]) -> None:
        """A lost worker of this kind is handed to `callback` instead of ending the run."""
        self._replaceable[kind] = callback

    def expect(self, name: str, message_type: type) -> asyncio.Future[Any]:
        """The next message of this type from this worker, as a future. At most one may be outstanding."""
        key = (name, message_type)
        if key in self._answers and not self._answers[key].done():
            raise RuntimeError(f"{message_type.__name__} of {name} is awaited already")
        future = self._answers[key] = asyncio.get_running_loop().create_future()
        return future

    async def ask(self, name: str, message: object, answer: type, limit_s: float) -> Any:
        """Send a message and return the worker's answer.

        Raises:
            RunFailed: no answer within the limit.
            WorkerLost: the worker is gone.
        """
        future = self.expect(name, answer)
        try:
            await self.send(name, message)
            return await within(limit_s, f"{answer.__name__} from {name}", future)
        finally:
            if self._answers.get((name, answer)) is future:
                del self._answers[name, answer]

    async def send(self, name: str, message: object) -> None:
        """Send a message to a worker. Raises WorkerLost if it is not there."""
        worker = self.workers.get(name)
        if worker is None:
            raise WorkerLost(f"{name} is not connected")
        try:
            await self._channel.send(worker.peer, message)
        except PeerGone as error:
            self.lost(name, str(error))
            raise WorkerLost(str(error)) from error

    async def send_all(self, message: object) -> None:
        """Send to every worker that is still there."""
        for worker in list(self.workers.values()):
            try:
                await self._channel.send(worker.peer, message)
            except PeerGone:
                continue

    def names(self, kind: WorkerKind) -> list[str]:
        """Names of the workers of a kind, by index."""
        workers = sorted((w for w in self.workers.values() if w.kind == kind), key=lambda worker: worker.index)
        return [worker.name for worker in workers]

    def missing(self) -> list[str]:
        """Expected workers that are not ready, with what they said last."""
        lines = []
        for name in sorted(self._expected):
            worker = self.workers.get(name)
            if worker is None:
                lines.append(f"{name} (not connected)")
            elif not worker.ready:
                lines.append(f"{name} ({worker.detail or 'connected'})")
        return lines

    async def wait_until_ready(self, limit_s: float) -> None:
        """Wait for all expected workers.

        Raises:
            RunFailed: the limit passed; the message names who is missing and what they said last.
        """
        try:
            async with asyncio.timeout(limit_s):
                while self.missing():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise RunFailed(
                f"controller.start_timeout_s: not ready after {limit_s:g} s: {', '.join(self.missing())}"
            ) from None

    async def receive_forever(self) -> None:
        """Take in messages and dispatch them. What a handler raises ends the run."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, message = await self._channel.receive()
            except CodecError as error:
                self._events.emit(Notice(level="warning", text=f"dropped a message: {error}"))
                continue
            if isinstance(message, Hello):
                await self._admit(peer, message)
                continue
            worker = self._by_peer.get(peer)
            if worker is None:
                self.strangers += 1
                continue
            worker.last_heard = loop.time()
            self._dispatch(worker, message)

    async def heartbeat_forever(self) -> None:
        """Send heartbeats and notice silence."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self.send_all(Heartbeat())
            for worker in list(self.workers.values()):
                silent = loop.time() - worker.last_heard
                if silent > self._silence_limit_s:
                    self.lost(worker.name, f"silent for {silent:.0f} s (controller.silence_limit_s)")

    def lost(self, name: str, reason: str) -> None:
        """A worker is gone: fail who waits for it, and end the run unless its kind is replaceable.

        Raises:
            WorkerLost: the run cannot go on without it.
        """
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self._by_peer.pop(worker.peer, None)
        for (owner, _), future in self._answers.items():
            if owner == name and not future.done():
                future.set_exception(WorkerLost(f"{name} was lost: {reason}"))
        replace = self._replaceable.get(worker.kind)
        if replace is None:
            raise WorkerLost(f"{name} was lost: {reason}")
        replace(worker, reason)

    async def _admit(self, peer: bytes, hello: Hello) -> None:
        name = f"{hello.kind}-{hello.index}"
        refusal = ""
        if hello.version != laminar.__version__:
            refusal = f"it runs laminar {hello.version}, the controller {laminar.__version__}"
        elif name not in self._expected:
            refusal = f"the config of this run has no {name}"
        elif name in self.workers and self.workers[name].peer != peer:
            refusal = f"{name} is here already (process {self.workers[name].pid} on {self.workers[name].host})"
        if refusal:
            self._events.emit(
                Notice(level="warning", text=f"turned {name} (process {hello.pid} on {hello.host}) away: {refusal}")
            )
            await self._channel.send(peer, Shutdown(reason=refusal))
            return
        worker = Worker(
            name=name,
            kind=hello.kind,
            index=hello.index,
            peer=peer,
            pid=hello.pid,
            host=hello.host,
            last_heard=asyncio.get_running_loop().time(),
        )
        self.workers[name] = worker
        self._by_peer[peer] = worker
        await self._channel.send(peer, self._welcome(hello.kind, hello.index))
        self._events.emit(WorkerJoined(worker=name, host=hello.host, pid=hello.pid))
        self._changed.set()

    def _dispatch(self, worker: Worker, message: Any) -> None:
        future = self._answers.get((worker.name, type(message)))
        if future is not None and not future.done():
            future.set_result(message)
        elif isinstance(message, Heartbeat):
            return
        elif isinstance(message, Progress):
            worker.detail = message.text
            self._events.emit(WorkerProgress(worker=worker.name, text=message.text))
        elif isinstance(message, Ready):
            worker.ready, worker.detail = True, message.detail
            self._events.emit(WorkerReady(worker=worker.name, detail=message.detail))
            self._changed.set()
        elif isinstance(message, WorkerFailed):
            if message.user_error:
                raise UserError(f"{worker.name}: {message.error}")
            self.lost(worker.name, message.error)
        elif type(message) in self._handlers:
            self._handlers[type(message)](worker, message)
        else:
            self._events.emit(
                Notice(level="warning", text=f"{worker.name} sent {type(message).__name__}, which nobody waits for")
            )

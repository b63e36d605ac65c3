"""Which workers belong to the run, and the one loop that takes in what they say.

Invariant: a message is handled only if its sender said hello and was let in; whoever waits for an answer of a worker
that is lost is told so at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args

import laminar
from laminar.controller.waiting import discard, within
from laminar.errors import RunFailed, UserError, WorkerLost
from laminar.observability.events import EventBus, Notice, WorkerJoined, WorkerProgress, WorkerReady
from laminar.protocol.channel import ControllerChannel, PeerClosed, PeerGone
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

SENDS_AT_ONCE = 32


@dataclass(kw_only=True, slots=True)
class _Awaited:
    """An answer that someone waits for."""

    kinds: type | UnionType
    matches: Callable[[Any], bool]
    future: asyncio.Future[Any]


def _any(_: Any) -> bool:
    return True


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
        start_limit_s: float,
        closed: Callable[[Worker, str], str] = lambda worker, reason: reason,
        restored: bool = False,
    ) -> None:
        """`restored`: an earlier controller has had all of them ready."""
        self.workers: dict[str, Worker] = {}
        self.strangers = 0  # messages from peers that are not workers of this run
        self._channel = channel
        self._events = events
        self._expected = dict.fromkeys(expected)
        self._welcome = welcome
        self._heartbeat_s = heartbeat_s
        self._silence_limit_s = silence_limit_s
        self._start_limit_s = max(
            silence_limit_s, start_limit_s
        )  # imports and compilers keep a starting worker from its loop
        self._closed = closed
        self._by_peer: dict[bytes, Worker] = {}
        self._handlers: dict[type, Handler] = {}
        self._awaited: dict[str, list[_Awaited]] = {}  # by worker
        self._turned_away: dict[bytes, None] = {}
        self._changed = asyncio.Event()
        self._losses: Counter[str] = Counter()  # by worker
        self._were_ready: dict[str, None] = {}  # names that were ready at least once
        if restored:
            self._were_ready.update(self._expected)
        self._late: dict[str, None] = {}  # names that were added when the run had begun
        self._replaceable: dict[str, Callable[[Worker, str], None]] = {}
        self._on_ready: dict[str, Callable[[Worker], None]] = {}
        # A host with a relay of its own may come at any time.
        self._refusals: dict[str, Callable[[str, str], str]] = {"relay": lambda name, host: ""}

    def handle(self, message_type: type, handler: Handler) -> None:
        """Call `handler` for every message of this type that nobody awaits by `expect`."""
        self._handlers[message_type] = handler

    def on_lost(self, kind: str, callback: Callable[[Worker, str], None]) -> None:
        """A lost worker of this kind is handed to `callback` instead of ending the run."""
        self._replaceable[kind] = callback

    def on_ready(self, kind: str, callback: Callable[[Worker], None]) -> None:
        """Call `callback` whenever a worker of this kind has become ready."""
        self._on_ready[kind] = callback

    def may_join(self, kind: str, refusal: Callable[[str, str], str]) -> None:
        """Workers of this kind may come at any time, of any index, unless `refusal(name, host)` says why not."""
        self._refusals[kind] = refusal

    def expect_worker(self, name: str) -> None:
        """The run wants this worker from now on, and goes on if it does not come."""
        self._expected[name] = None
        self._late[name] = None

    def expect(self, name: str, kinds: type | UnionType, matches: Callable[[Any], bool] = _any) -> asyncio.Future[Any]:
        """The next message of this type from this worker that `matches`, as a future; others of its type are passed by."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(name, []).append(_Awaited(kinds=kinds, matches=matches, future=future))
        return future

    async def ask(
        self,
        name: str,
        message: object,
        answer: type | UnionType,
        limit_s: float,
        matches: Callable[[Any], bool] = _any,
    ) -> Any:
        """Send a message and return the worker's answer: the first of this type that `matches` (a repeated one does not).

        Raises:
            RunFailed: no answer within the limit.
            WorkerLost: the worker is gone.
        """
        future = self.expect(name, answer, matches)
        try:
            await self.send(name, message)
            kinds = " or ".join(kind.__name__ for kind in get_args(answer) or (answer,))
            return await within(limit_s, f"{kinds} from {name}", future)
        finally:
            discard(future)

    async def ask_all(
        self,
        names: Sequence[str],
        message: object,
        answer: type | UnionType,
        limit_s: float,
        matches: Callable[[Any], bool] = _any,
    ) -> list[Any]:
        """Send a message to several workers at once and return their answers; the first failure ends all waits.

        Raises:
            RunFailed: one did not answer within the limit.
            WorkerLost: one is gone.
        """
        tasks = [
            asyncio.create_task(self.ask(name, message, answer, limit_s, matches), name=f"ask {name}") for name in names
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def send(self, name: str, message: object) -> None:
        """Send a message to a worker. Raises WorkerLost if it is not there."""
        worker = self.workers.get(name)
        if worker is None:
            raise WorkerLost(f"{name} is not connected")
        try:
            await self._channel.send(worker.peer, message)
        except PeerGone as error:
            if reason := self._closed(worker, str(error)):  # else somebody who knows more is about to tell
                self.lost(name, reason)
            raise WorkerLost(str(error)) from error

    async def send_all(self, message: object) -> None:
        """Send to every worker that is still there. To many it takes long: others get their turn in between."""
        for number, worker in enumerate(list(self.workers.values()), start=1):
            if number % SENDS_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                await self._channel.send(worker.peer, message)
            except PeerGone:
                continue

    def names(self, kind: WorkerKind) -> list[str]:
        """Names of the workers of a kind, by index."""
        workers = sorted((w for w in self.workers.values() if w.kind == kind), key=lambda worker: worker.index)
        return [worker.name for worker in workers]

    def expects(self, name: str) -> bool:
        """Whether the run still wants this worker."""
        return name in self._expected

    def dismiss(self, name: str) -> None:
        """The run goes on without this worker; it is turned away if it comes back."""
        self._expected.pop(name, None)
        self._announce()

    def _announce(self) -> None:
        """Wake all who wait for workers; each looks again, and waits for the next time."""
        self._changed.set()
        self._changed = asyncio.Event()

    def missing(self, names: Sequence[str] | None = None) -> list[str]:
        """Expected workers (or these) that are not ready, with what they said last."""
        lines = []
        for name in sorted(self._expected if names is None else names):
            worker = self.workers.get(name)
            if worker is None:
                lines.append(f"{name} (not connected)")
            elif not worker.ready:
                lines.append(f"{name} ({worker.detail or 'connected'})")
        return lines

    async def wait_until_ready(self, limit_s: float, names: Sequence[str] | None = None) -> None:
        """Wait for all expected workers, or for these.

        Raises:
            RunFailed: the limit passed; the message names who is missing and what they said last.
            WorkerLost: one of `names` came and was lost again meanwhile.
        """
        before = {name: self._losses[name] for name in names or ()}
        try:
            async with asyncio.timeout(limit_s):
                while self.missing(names):
                    for name, losses in before.items():
                        if self._losses[name] > losses:
                            raise WorkerLost(f"{name} was lost while it started")
                    changed = self._changed
                    await changed.wait()
        except TimeoutError:
            raise RunFailed(
                f"controller.start_timeout_s: not ready after {limit_s:g} s: {', '.join(self.missing(names))}"
            ) from None

    async def receive_forever(self) -> None:
        """Take in messages and dispatch them. What a handler raises ends the run.

        Handlers do not wait, and it is the channel that gives others their turn while messages keep coming.
        """
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
            if isinstance(message, PeerClosed):
                if worker is not None and (reason := self._closed(worker, message.reason)):
                    self.lost(worker.name, reason)
                continue
            if worker is None:
                await self._turn_away(peer)
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
                if silent > (self._silence_limit_s if worker.ready else self._start_limit_s):
                    key = "silence_limit_s" if worker.ready else "start_timeout_s"
                    self.lost(worker.name, f"silent for {silent:.0f} s (controller.{key})")

    def lost(self, name: str, reason: str) -> None:
        """A worker is gone: fail who waits for it, and end the run unless its kind is replaceable.

        Raises:
            WorkerLost: the run cannot go on without it.
        """
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self._by_peer.pop(worker.peer, None)
        self._losses[name] += 1
        self._announce()
        for awaited in self._awaited.pop(name, []):
            if not awaited.future.done():
                awaited.future.set_exception(WorkerLost(f"{name} was lost: {reason}"))
        replace = self._replaceable.get(worker.kind)
        if replace is None:
            raise WorkerLost(f"{name} was lost: {reason}")
        replace(worker, reason)

    async def release(self, name: str, reason: str) -> None:
        """A worker has done its part: it is told to end, and its end is no loss."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        del self._by_peer[worker.peer]
        self._turned_away[worker.peer] = None
        self.dismiss(name)
        for awaited in self._awaited.pop(name, []):
            if not awaited.future.done():
                awaited.future.set_exception(WorkerLost(f"{name} has left: {reason}"))
        with contextlib.suppress(PeerGone):
            await self._channel.send(worker.peer, Shutdown(reason=reason))

    def did_not_come(self, name: str, reason: str) -> None:
        """A process that was started anew ended before it said hello: whoever waits for it is told.

        Raises:
            WorkerLost: it was never ready, so the run has not begun.
        """
        if name not in self._were_ready and name not in self._late:
            raise WorkerLost(f"{name} did not start: {reason}")
        self._losses[name] += 1
        self._announce()

    async def _turn_away(self, peer: bytes) -> None:
        """Nothing of what a lost worker still sends is taken in; it is told once to end, so that it can start anew."""
        self.strangers += 1
        if peer in self._turned_away:
            return
        self._turned_away[peer] = None
        with contextlib.suppress(PeerGone):
            await self._channel.send(peer, Shutdown(reason="this run does not know this worker (any more)"))

    def _refusal(self, name: str, hello: Hello) -> str:
        """Why this worker is not let in; empty if it is."""
        if hello.version != laminar.__version__:
            return f"it runs laminar {hello.version}, the controller {laminar.__version__}"
        if hello.kind not in self._refusals and name not in self._expected:
            return f"the config of this run has no {name}"
        if name in self.workers:
            return f"{name} is here already (process {self.workers[name].pid} on {self.workers[name].host})"
        return self._refusals[hello.kind](name, hello.host) if hello.kind in self._refusals else ""

    async def _admit(self, peer: bytes, hello: Hello) -> None:
        name = f"{hello.kind}-{hello.index}"
        if peer in self._turned_away or (self._by_peer.get(peer) is not None):
            return  # said twice
        refusal = self._refusal(name, hello)
        if refusal:
            self._events.emit(
                Notice(level="warning", text=f"turned {name} (process {hello.pid} on {hello.host}) away: {refusal}")
            )
            self._turned_away[peer] = None
            with contextlib.suppress(PeerGone):
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
        if hello.kind == "rollout":  # it may have come by itself
            self._expected[name] = None
        self._events.emit(WorkerJoined(worker=name, host=hello.host, pid=hello.pid))
        try:
            await self._channel.send(peer, self._welcome(hello.kind, hello.index))
        except PeerGone as error:
            self.lost(name, str(error))
            return
        self._announce()

    def _dispatch(self, worker: Worker, message: Any) -> None:
        waiting = self._awaited.get(worker.name)
        if waiting and self._answer(waiting, message):
            return
        if (handler := self._handlers.get(type(message))) is not None:  # first, for it is the hot path
            handler(worker, message)
        elif isinstance(message, Heartbeat):
            return
        elif isinstance(message, Progress):
            worker.detail = message.text
            self._events.emit(WorkerProgress(worker=worker.name, text=message.text))
        elif isinstance(message, Ready):
            if worker.ready:
                return  # said twice
            worker.ready, worker.detail = True, message.detail
            self._were_ready[worker.name] = None
            self._events.emit(WorkerReady(worker=worker.name, detail=message.detail))
            if worker.kind in self._on_ready:
                self._on_ready[worker.kind](worker)
            self._announce()
        elif isinstance(message, WorkerFailed):
            if message.user_error:
                raise UserError(f"{worker.name}: {message.error}")
            self.lost(worker.name, message.error)
        else:
            self._events.emit(
                Notice(level="warning", text=f"{worker.name} sent {type(message).__name__}, which nobody waits for")
            )

    def _answer(self, waiting: list[_Awaited], message: Any) -> bool:
        """Hand a message to the first who waits for it."""
        for index, awaited in enumerate(waiting):
            if awaited.future.done():
                continue
            if isinstance(message, awaited.kinds) and awaited.matches(message):
                awaited.future.set_result(message)
                del waiting[index]
                return True
        waiting[:] = [awaited for awaited in waiting if not awaited.future.done()]
        return False

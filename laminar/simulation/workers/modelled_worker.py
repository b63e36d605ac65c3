"""What all modelled workers share: the handshake, heartbeats, timers, and dying, hanging and ending as processes do.

Invariant: a worker that has died or ended is never heard again, and does nothing any more; one that hangs does nothing until
it is resumed, and then what fell due meanwhile, in order, before what it was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import laminar
from laminar.protocol import messages
from laminar.simulation.channels.network import SimulatedNetwork

OF_THE_HANDSHAKE = frozenset({messages.Welcome, messages.Heartbeat, messages.Shutdown})


@dataclass(kw_only=True, slots=True, frozen=True)
class Life:
    """One process of a worker; one that is started again has another number."""

    index: int
    number: int = 1  # 1 for the first process of this worker
    host: str = "host-0"
    start_s: float = 0.0  # from the Welcome to Ready
    heartbeat_s: float | None = None  # None: it sends none


class ModelledWorker:
    """A worker without tasks: callbacks of the network and timers of the loop. It says hello when it is made."""

    kind: ClassVar[messages.WorkerKind]

    def __init__(self, network: SimulatedNetwork, life: Life) -> None:
        """Connect and say hello."""
        self.name = f"{self.kind}-{life.index}"
        self.peer = f"{self.name}#{life.number}"  # its name on the network
        self.life = life
        self.loop = asyncio.get_running_loop()
        self.alive = True
        self.hung = False
        self.welcomed = False
        self.is_ready = False
        # Called once when the process ends, by itself or by `kill`.
        self.on_ended: Callable[[ModelledWorker, str], None] = lambda worker, reason: None
        self._network = network
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # timers that fell due while it hung
        self._end = network.connect(self.peer, self._on_message)
        self.send = self._end.send
        self._say_hello()

    def _say_hello(self) -> None:
        """The process number tells lives apart, as a pid does."""
        life = self.life
        self.send(
            messages.Hello(
                kind=self.kind, index=life.index, pid=life.number, host=life.host, version=laminar.__version__
            )
        )

    def controller_back(self) -> None:
        """Another controller has taken the lost one's place, and this process has found it."""
        if self.alive:
            self._end = self._network.reconnect(self.peer, self._on_message)
            self.send = self._end.send
            self._say_hello()

    # ------------------------------------------------------------ what each kind does

    def handle(self, message: Any) -> None:
        """Take a message of the controller, other than those of the handshake."""
        raise RuntimeError(f"a {self.kind} does not take {type(message).__name__}")

    def before_ready(self) -> None:
        """Say what the controller must know before it can take work."""

    def before_ready_again(self) -> None:
        """Say what it holds, to a controller that took another's place."""
        self.before_ready()

    def after_ready_again(self) -> None:
        """Send what that controller may lack."""

    def ready_detail(self) -> str:
        """What it says of itself when it is ready."""
        return f"modelled {self.kind}"

    def freeze(self) -> None:
        """It begins to hang."""

    def thaw(self) -> None:
        """It goes on."""

    def ended(self) -> None:
        """It has died or ended."""

    # ------------------------------------------------------------ faults

    def kill(self, reason: str = "signal SIGKILL") -> None:
        """Die at once: nothing that it has sent arrives any more, nothing else is sent."""
        if self.alive:
            self._network.disconnect(self.peer)
            self._over(reason)

    def hang(self) -> None:
        """Stand still (SIGSTOP)."""
        if self.alive and not self.hung:
            self.hung = True
            self._network.hang(self.peer)
            self.freeze()

    def resume(self) -> None:
        """Go on (SIGCONT)."""
        if self.alive and self.hung:
            self.hung = False
            self.thaw()
            held, self._held = self._held, []
            for callback, arguments in held:
                if self.alive:
                    callback(*arguments)
            if self.alive:
                self._network.resume(self.peer)

    # ------------------------------------------------------------ for its kinds

    def at(self, when: float, callback: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        """Call it at this time on the loop's clock, if the worker is alive then; later if it hangs then."""
        return self.loop.call_at(when, self._due, callback, arguments)

    def after(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        """As `at`, this many seconds from now."""
        return self.loop.call_at(self.loop.time() + seconds, self._due, callback, arguments)

    def _due(self, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.hung:
            self._held.append((callback, arguments))
        elif self.alive:
            callback(*arguments)

    def _on_message(self, message: Any) -> None:
        if not self.alive:
            return
        if type(message) not in OF_THE_HANDSHAKE:  # first, for it is the hot path
            self.handle(message)
        elif isinstance(message, messages.Shutdown):
            self._end.close()  # what it has sent still arrives
            self._over(f"told to end: {message.reason}")
        elif isinstance(message, messages.Welcome) and not self.welcomed:
            self.welcomed = True
            self.after(self.life.start_s, self._ready)
        elif isinstance(message, messages.Welcome) and self.is_ready:
            self.before_ready_again()
            self.send(messages.Ready(detail=self.ready_detail()))
            self.after_ready_again()

    def _ready(self) -> None:
        self.is_ready = True
        self.before_ready()
        self.send(messages.Ready(detail=self.ready_detail()))
        if self.life.heartbeat_s is not None:
            self.after(self.life.heartbeat_s, self._beat, self.life.heartbeat_s)

    def _beat(self, interval_s: float) -> None:
        self.send(messages.Heartbeat())
        self.after(interval_s, self._beat, interval_s)

    def _over(self, reason: str) -> None:
        self.alive = False
        self._held.clear()
        self.ended()
        self.on_ended(self, reason)

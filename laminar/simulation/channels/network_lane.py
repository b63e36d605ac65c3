"""One direction of one peer's connection in a simulated network.

Invariant: messages arrive in the order in which they were sent, duplicates excepted, and the end of the connection after
all of them; each message is counted as delivered or dropped exactly once.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from laminar.protocol.codec import Codec

Trace = Callable[[float, str, object], None]


@dataclass(kw_only=True, slots=True)
class NetworkStatistics:
    """Counts of messages; sent + duplicated = delivered + dropped + under way."""

    sent: int = 0
    delivered: int = 0
    dropped: int = 0
    duplicated: int = 0


@dataclass(kw_only=True, slots=True)
class Wire:
    """What all lanes of a network share."""

    loop: asyncio.AbstractEventLoop
    rng: random.Random
    codec: Codec | None  # None: the receiver gets the very object that was sent
    trace: Trace | None  # called at each delivery
    statistics: NetworkStatistics = field(default_factory=NetworkStatistics)


class Lane:
    """A queue of messages under way, and of those that have come and are held back by a fault."""

    def __init__(
        self,
        wire: Wire,
        route: str,
        latency_s: float | Callable[[], float],
        receive: Callable[[Any], None],
        *,
        at_once: bool,
    ) -> None:
        """
        Args:
            wire: what all lanes share.
            route: "rollout-0 -> controller", for the trace.
            latency_s: seconds from sending to arrival, or what draws them for each message.
            receive: called with each message.
            at_once: without latency, deliver inside `send`: for a receiver that only puts the message aside. Else
                in a callback of its own, so that the receiver's failure is not the sender's.
        """
        self.latency_s = latency_s
        self.duplicates = 0.0  # probability
        self.duplicate_within_s = 0.0
        self.blocked = False
        self.open_for_sending = True
        self._wire = wire
        self._route = route
        self._receive = receive
        self._at_once = at_once
        self._under_way: deque[Any] = deque()
        self._held: deque[Any] = deque()
        self._last_arrival = 0.0  # on the loop's clock
        self._discards = False
        self._has_delivered = False
        self._on_end: Callable[[], None] | None = None  # the end has come and is held back by a fault

    def send(self, message: object) -> None:
        """Send a message; dropped if the lane is closed.

        Raises:
            CodecError: the network uses the codec, and this is not a message of the protocol.
        """
        wire = self._wire
        wire.statistics.sent += 1
        if not self.open_for_sending:
            wire.statistics.dropped += 1
            return
        # The arrays of the frames are views of the sender's memory, into which it may write again: copied.
        packed = message if wire.codec is None else [bytes(frame) for frame in wire.codec.encode(message)]
        latency_s = self.latency_s if isinstance(self.latency_s, float) else self.latency_s()
        now = wire.loop.time()
        arrival = max(now + latency_s, self._last_arrival)
        if self._at_once and arrival <= now and not self._under_way:
            self._take(packed)
        else:
            self._last_arrival = arrival
            self._under_way.append(packed)
            wire.loop.call_at(arrival, self._arrive)
        if self.duplicates and wire.rng.random() < self.duplicates:
            wire.statistics.duplicated += 1
            wire.loop.call_at(arrival + wire.rng.random() * self.duplicate_within_s, self._take, packed)

    def set_blocked(self, blocked: bool) -> None:
        """Hold back what arrives, or let it through again, in order and in a callback of its own."""
        self.blocked = blocked
        if not blocked and (self._held or self._on_end is not None):
            self._wire.loop.call_soon(self._release)

    def close_for_sending(self) -> None:
        """What is sent from now on is dropped; what is under way still arrives."""
        self.open_for_sending = False

    def close(self) -> None:
        """Drop all: what is under way, what is held back, and what is sent from now on."""
        self.open_for_sending = False
        self._discards = True
        self._wire.statistics.dropped += len(self._under_way) + len(self._held)
        self._under_way.clear()
        self._held.clear()

    def tell_end(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` a latency from now, after what is under way, unless nothing has ever been delivered by then.

        A blocked lane holds it back. Duplicates do not outlive it. No message: neither counted nor traced.
        """
        latency_s = self.latency_s if isinstance(self.latency_s, float) else self.latency_s()
        loop = self._wire.loop
        loop.call_at(max(loop.time() + latency_s, self._last_arrival), self._end_comes, on_end)

    def _end_comes(self, on_end: Callable[[], None]) -> None:
        if self.blocked or self._held:
            self._on_end = on_end
            return
        self._discards = True
        if self._has_delivered:
            on_end()

    def _arrive(self) -> None:
        if self._under_way:  # else it was dropped on its way
            self._take(self._under_way.popleft())

    def _take(self, packed: Any) -> None:
        if self._discards:  # a duplicate whose lane has come to its end
            self._wire.statistics.dropped += 1
        elif self.blocked or self._held:
            self._held.append(packed)
        else:
            self._deliver(packed)

    def _release(self) -> None:
        while self._held and not self.blocked:
            self._deliver(self._held.popleft())
        if self._on_end is not None and not self.blocked:
            on_end, self._on_end = self._on_end, None
            self._end_comes(on_end)

    def _deliver(self, packed: Any) -> None:
        wire = self._wire
        wire.statistics.delivered += 1
        self._has_delivered = True
        message = packed if wire.codec is None else wire.codec.decode(packed)
        if wire.trace is not None:
            wire.trace(wire.loop.time(), self._route, message)
        self._receive(message)

"""The controller's and the workers' channels in memory, with latency and faults: what ZeroMQ is in real runs.

Invariants: messages of one peer and direction arrive in the order in which they were sent (duplicates excepted), whatever the
latencies and faults; those of different peers may overtake one another. Each message that was sent is delivered, dropped
or under way, so the statistics add up. All chance comes from seeded generators: equal runs see equal networks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from laminar.protocol.channel import PeerClosed, PeerGone
from laminar.protocol.codec import Codec
from laminar.simulation.channels.inbox import Inbox
from laminar.simulation.channels.network_lane import Lane, NetworkStatistics, Trace, Wire

CLOSED = PeerClosed(reason="its connection closed")


def jittered_latency(base_s: float, jitter_s: float, rng: random.Random) -> Callable[[str], float]:
    """A latency for `SimulatedNetwork`: base_s plus a uniform share of jitter_s, drawn for each message. Seconds."""
    return lambda peer: base_s + jitter_s * rng.random()


class SimulatedNetwork:
    """One controller end and any number of worker ends. Make it inside the loop that will run it.

    A name stands for one life of a worker: one that is started again connects under a new name ("rollout-0#2"), as its
    process would from a new socket. The faults may be called at any time; an unknown name is a ValueError.
    """

    def __init__(
        self,
        *,
        latency: float | Callable[[str], float] = 0.0,
        seed: int = 0,
        through_codec: bool = False,
        trace: Trace | None = None,
        tell_closed: bool = True,
    ) -> None:
        """
        Args:
            latency: seconds from sending to arrival; a function is asked for each message, with the peer's name.
            seed: of the generator that decides about duplicates.
            through_codec: encode and decode every message; else the receiver gets the very object that was sent.
            trace: called at each delivery with the time, "rollout-0 -> controller" or the reverse, and the message.
            tell_closed: the controller receives `PeerClosed` when a peer is disconnected; else it has to miss the peer.
        """
        self._tell_closed = tell_closed
        self._latency = latency
        self._wire = Wire(
            loop=asyncio.get_running_loop(),
            rng=random.Random(seed),
            codec=Codec() if through_codec else None,
            trace=trace,
        )
        self._links: dict[bytes, _Link] = {}  # of all names that there ever were
        self.controller = ControllerEnd(self._links)

    def connect(self, name: str, on_message: Callable[[Any], None]) -> WorkerEnd:
        """Connect a worker that is not a task: on_message is called with each message of the controller.

        Raises:
            ValueError: the name has been used.
        """
        peer = name.encode()
        if peer in self._links:
            raise ValueError(f"{name} has connected before; a worker that is started again needs another name")
        return WorkerEnd(self._connect(name, on_message))

    def _connect(self, name: str, on_message: Callable[[Any], None]) -> _Link:
        peer, latency_s = name.encode(), self._latency_of(name)
        link = self._links[peer] = _Link(
            Lane(self._wire, f"controller -> {name}", latency_s, on_message, at_once=False),
            Lane(
                self._wire,
                f"{name} -> controller",
                latency_s,
                lambda message: self.controller.inbox.put((peer, message)),
                at_once=True,
            ),
            partial(self.controller.inbox.put, (peer, CLOSED)) if self._tell_closed else None,
        )
        return link

    def reconnect(self, name: str, on_message: Callable[[Any], None]) -> WorkerEnd:
        """A worker's process dials the controller that took the lost one's place; its partition or hang goes on.

        What the lost one had sent, and what is still under way, is dropped: it belongs to the old connection.
        """
        old = self._link(name)
        old.to_worker.close()
        old.to_controller.close()
        link = self._connect(name, on_message)
        link.partitioned, link.hung = old.partitioned, old.hung
        link.set_blocked()
        return WorkerEnd(link)

    def worker(self, name: str) -> AwaitableWorkerEnd:
        """Connect a worker that is a coroutine: a `WorkerChannel`. Raises ValueError if the name has been used."""
        inbox: Inbox[Any] = Inbox()
        return AwaitableWorkerEnd(self.connect(name, inbox.put), inbox)

    def is_connected(self, name: str) -> bool:
        """Whether a peer of this name is there now."""
        link = self._links.get(name.encode())
        return link is not None and link.connected

    @property
    def statistics(self) -> NetworkStatistics:
        """Counts since the start."""
        return self._wire.statistics

    @property
    def under_way(self) -> int:
        """Messages sent and neither delivered nor dropped yet."""
        counts = self._wire.statistics
        return counts.sent + counts.duplicated - counts.delivered - counts.dropped

    # ------------------------------------------------------------ faults

    def disconnect(self, name: str, *, deliver_sent: bool = False) -> None:
        """The peer dies: the controller's `send` raises PeerGone from now on, and what is under way to it is dropped.

        The controller receives `PeerClosed` a latency later, after what still arrives; not before a partition heals.

        Args:
            name: of the peer.
            deliver_sent: what it has sent still arrives, unless a partition holds it back; else that is dropped too.
        """
        self._link(name).disconnect(deliver_sent=deliver_sent)

    def lose_controller(self) -> None:
        """The controller dies: nothing that it would still say is sent, and nothing reaches it any more.

        What it has sent still arrives. Workers talk to the next controller, `self.controller`, after they `reconnect`.
        """
        self.controller.lost = True
        self.controller = ControllerEnd(self._links)
        for link in self._links.values():
            link.lose_controller()

    def partition(self, name: str) -> None:
        """No message arrives, in either direction, until `heal`; none is lost unless the peer is disconnected."""
        link = self._link(name)
        link.partitioned = True
        link.set_blocked()

    def heal(self, name: str) -> None:
        """End a partition; what was held back arrives now, in order."""
        link = self._link(name)
        link.partitioned = False
        link.set_blocked()

    def hang(self, name: str) -> None:
        """The worker takes no message until `resume` (SIGSTOP). That it sends none meanwhile is its owner's business."""
        link = self._link(name)
        link.hung = True
        link.set_blocked()

    def resume(self, name: str) -> None:
        """End a hang; the worker takes what has come meanwhile, in order."""
        link = self._link(name)
        link.hung = False
        link.set_blocked()

    def slow(self, name: str, *, factor: float = 1.0, extra_s: float = 0.0) -> None:
        """Set the latency of what is sent from now on, both ways: factor times the network's, plus extra_s seconds."""
        link = self._link(name)
        link.to_worker.latency_s = link.to_controller.latency_s = self._latency_of(name, factor, extra_s)

    def duplicate(self, name: str, probability: float, *, within_s: float = 1.0) -> None:
        """Let messages that the worker sends from now on arrive a second time with this probability.

        The second copy comes up to within_s seconds after the first, also after later messages: a worker that sends
        again what it is not sure has arrived.
        """
        lane = self._link(name).to_controller
        lane.duplicates, lane.duplicate_within_s = probability, within_s

    def _link(self, name: str) -> _Link:
        link = self._links.get(name.encode())
        if link is None:
            raise ValueError(f"no peer {name} has ever connected")
        return link

    def _latency_of(self, name: str, factor: float = 1.0, extra_s: float = 0.0) -> float | Callable[[], float]:
        draw = self._latency
        if not callable(draw):
            return float(draw * factor + extra_s)
        if factor == 1.0 and extra_s == 0.0:
            return partial(draw, name)
        return lambda: draw(name) * factor + extra_s


class _Link:
    """Both directions of one peer, and its faults."""

    def __init__(self, to_worker: Lane, to_controller: Lane, on_closed: Callable[[], None] | None) -> None:
        self.to_worker = to_worker
        self.to_controller = to_controller
        self.connected = True
        self.partitioned = False
        self.hung = False
        self._on_closed = on_closed

    def set_blocked(self) -> None:
        self.to_worker.set_blocked(self.partitioned or self.hung)
        self.to_controller.set_blocked(self.partitioned)

    def lose_controller(self) -> None:
        self.connected = False
        self.to_worker.close_for_sending()
        self.to_controller.close()

    def disconnect(self, *, deliver_sent: bool) -> None:
        if self.connected and self._on_closed is not None:
            self.to_controller.tell_end(self._on_closed)
        self.connected = False
        self.to_worker.close()
        if deliver_sent and not self.partitioned:
            self.to_controller.close_for_sending()
        else:
            self.to_controller.close()


class WorkerEnd:
    """The end of a worker that is not a task; the controller's messages go to its callback."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self.send = link.to_controller.send  # one call less, for the simulator's hottest path

    def close(self) -> None:
        """Leave; what was sent still arrives."""
        self._link.disconnect(deliver_sent=True)


class AwaitableWorkerEnd:
    """The end of a worker that is a coroutine: a `WorkerChannel`."""

    def __init__(self, end: WorkerEnd, inbox: Inbox[Any]) -> None:
        self._end = end
        self._inbox = inbox

    async def receive(self) -> Any:
        """Next message from the controller; waits for ever once disconnected, as a real worker's socket does."""
        return await self._inbox.get()

    async def send(self, message: object) -> None:
        """Send a message to the controller; dropped if this end is disconnected."""
        self._end.send(message)

    def close(self) -> None:
        """Leave; what was sent still arrives."""
        self._end.close()


class ControllerEnd:
    """The controller's end: a `ControllerChannel`."""

    def __init__(self, links: dict[bytes, _Link]) -> None:
        self.inbox: Inbox[tuple[bytes, Any]] = Inbox()
        self.lost = False  # its process has died
        self._links = links

    async def receive(self) -> tuple[bytes, Any]:
        """Next (peer, message), from any peer; (peer, PeerClosed) when a peer's connection has closed."""
        return await self.inbox.get()

    async def send(self, peer: bytes, message: object) -> None:
        """Send a message to a worker. Raises PeerGone if it is not connected."""
        link = self._links.get(peer)
        if link is None or not link.connected or self.lost:
            raise PeerGone(f"{peer.decode()} is not connected")
        link.to_worker.send(message)

    def close(self) -> None:
        """Nothing to give back."""

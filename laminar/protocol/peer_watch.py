"""Which peers of a ROUTER have lost their connection, noticed when TCP notices: a killed process's socket is closed at once.

ZeroMQ's monitor names a closed connection by its file descriptor, which the first message of each peer came with. That
is a hint and no more: descriptors are used again, a peer may have come back over another one, and the monitor speaks
before the ROUTER knows. What decides is a probe, an empty message that the peer's channel drops: ROUTER_MANDATORY refuses
it exactly when there is no connection. Invariant: a peer is said to be gone only if a probe was refused just then.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence

import zmq

# Seconds between probes of a peer whose connection may be closed: the ROUTER learns of it just after the monitor.
PROBE_AGAIN_S = (0.002, 0.01, 0.05)
PROBE_ALL_S = 0.25  # at most so often, after a connection closed: a peer may have moved to another descriptor unseen
_ENDPOINT = "inproc://closed-connections"  # within the ROUTER's own context
_EVENT = struct.Struct("=Hi")  # its kind, its value: here the file descriptor


class PeerWatch:
    """Watches one ROUTER, on the running loop. Make it before the ROUTER binds.

    A peer is watched from its first message until it is gone; a connection over which nothing came is none of its business.
    """

    def __init__(
        self, router: zmq.Socket[bytes], is_connected: Callable[[bytes], bool], found: Callable[[], None]
    ) -> None:
        """
        Args:
            router: the socket.
            is_connected: sends a probe, and says whether the ROUTER took it.
            found: called when `take_gone` has something new.
        """
        self.descriptors: dict[bytes, int] = {}  # that each peer's first message came over
        self._router = router
        self._is_connected = is_connected
        self._found = found
        self._gone: dict[bytes, None] = {}  # in the order in which they went
        self._loop = asyncio.get_running_loop()
        self._last_closing = 0.0  # on the loop's clock
        self._all_due: asyncio.TimerHandle | None = None
        router.monitor(_ENDPOINT, zmq.EVENT_DISCONNECTED)
        self._monitor: zmq.Socket[bytes] = router.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # no limit: at one, ZeroMQ's own thread would wait for this one
        self._monitor.connect(_ENDPOINT)
        self._reader = self._monitor.fileno()
        self._loop.add_reader(self._reader, self._read)
        self._read()  # ZeroMQ wakes only who has looked before, and found nothing

    def learn(self, peer: bytes, frames: Sequence[zmq.Frame]) -> list[bytes]:
        """Watch the sender of these frames, of a first message; returns their contents.

        It is probed: what closed its connection may have been read before its message was.
        """
        self.descriptors[peer] = int(frames[0].get(zmq.SRCFD))
        self._probe(peer, PROBE_AGAIN_S)
        return [frame.bytes for frame in frames]

    def refused(self, peer: bytes) -> None:
        """The ROUTER has just refused a message for this peer."""
        if peer in self.descriptors:
            del self.descriptors[peer]
            self._gone[peer] = None
            self._found()

    def take_gone(self) -> bytes | None:
        """A peer that went and has not come back, each once for each time that it went; None if there is no other."""
        while self._gone:
            peer = next(iter(self._gone))
            del self._gone[peer]
            if not self._is_connected(peer):
                self.descriptors.pop(peer, None)  # it had come back, and went again
                return peer
        return None

    def close(self) -> None:
        """Stop watching; before the ROUTER is closed."""
        self.descriptors.clear()
        self._gone.clear()
        if self._all_due is not None:
            self._all_due.cancel()
        self._loop.remove_reader(self._reader)
        self._router.disable_monitor()
        self._monitor.close(0)

    def _read(self) -> None:
        while True:
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._suspect(_EVENT.unpack(event)[1])

    def _suspect(self, descriptor: int) -> None:
        """A connection was closed: probe whose it was, and somewhat later all, since it may have been another's."""
        for peer in [peer for peer, own in self.descriptors.items() if own == descriptor]:
            self._probe(peer, PROBE_AGAIN_S)
        self._last_closing = self._loop.time()
        if self._all_due is None:
            self._all_due = self._loop.call_later(PROBE_ALL_S, self._probe_all)

    def _probe_all(self) -> None:
        for peer in list(self.descriptors):
            self._probe(peer, ())
        settled = self._loop.time() - self._last_closing > PROBE_ALL_S / 2
        self._all_due = None if settled else self._loop.call_later(PROBE_ALL_S, self._probe_all)

    def _probe(self, peer: bytes, again_s: Sequence[float]) -> None:
        if peer not in self.descriptors:
            return
        if not self._is_connected(peer):
            self.refused(peer)
        elif again_s:
            self._loop.call_later(again_s[0], self._probe, peer, again_s[1:])

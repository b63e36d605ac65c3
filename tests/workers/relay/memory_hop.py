"""Two ends of a hop within one test: what `send` queues at one end arrives at the other when that is advanced."""

from __future__ import annotations

from collections import deque

import numpy as np

from laminar.workers.relay.hop import FrameHead, HopError


class MemoryHop:
    """One end. Tests may set `damage` (called with each head and its arrived payload) and `frames_per_advance`."""

    def __init__(self, peer, place):
        self.peer = peer
        self.place = place
        self.other = None
        self.damage = None
        self.frames_per_advance = 4
        self.sent_heads = []  # every head that was given to `send`
        self.closed = False
        self._lost = None
        self._queue = deque()
        self._arrived = deque()

    @property
    def unsent(self):
        return len(self._queue)

    def send(self, head, payload=None):
        assert head.nbytes == (0 if payload is None else payload.nbytes)
        self.sent_heads.append(head)
        self._queue.append((head, payload))

    def receive(self):
        return self._arrived.popleft() if self._arrived else None

    def advance(self):
        progressed = False
        while self._lost is None and self.other._queue and len(self._arrived) < self.frames_per_advance:
            head, payload = self.other._queue.popleft()
            head = FrameHead.unpack(head.pack())
            memory = np.empty(0, np.uint8)
            if head.nbytes:
                try:
                    memory = self.place(head)
                except HopError as error:
                    self._lost = str(error)
                    break
                assert memory.nbytes == head.nbytes
                memory[:] = payload
                if self.damage is not None:
                    self.damage(head, memory)
            self._arrived.append((head, memory))
            progressed = True
        if self.other.closed and not self.other._queue and self._lost is None:
            self._lost = f"{self.peer} is lost: it has closed the hop"
        if self._lost is not None and not self._arrived:
            raise HopError(self._lost)
        return progressed

    def lose(self):
        """The neighbour has died: what it had queued is gone."""
        self.other._queue.clear()
        self._lost = f"{self.peer} is lost: it has died"

    def close(self):
        self.closed = True
        self._lost = self._lost or f"the hop to {self.peer} is closed"
        self._arrived.clear()


def memory_hops(upstream_place, downstream_place, *, upstream="upstream", downstream="downstream"):
    """(the upstream relay's end, the downstream relay's end); the names are those of the two relays."""
    ends = MemoryHop(downstream, upstream_place), MemoryHop(upstream, downstream_place)
    ends[0].other, ends[1].other = ends[1], ends[0]
    return ends

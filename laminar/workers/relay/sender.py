"""The upstream end of a hop: sends what the downstream neighbour asks for, each chunk as soon as it is here and checked.

Invariants:
- Only checked chunks are sent, from the version's own memory.
- What is queued at the hop is bounded, so that a slow neighbour costs no memory.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from laminar.weights.checksum import checksum
from laminar.weights.delta import encode_chunk
from laminar.workers.relay.carried_version import CarriedVersion, ChunkTable, Delta
from laminar.workers.relay.hop import FULL, Bytes, FrameHead, FrameKind, HopError
from laminar.workers.relay.receiver import FRAMES_PER_TURN, OpenHop
from laminar.workers.relay.want import MAX_WANT_BYTES, Want

WINDOW = 6  # frames queued at the hop


class Sender:
    """Sends one version to one downstream neighbour."""

    def __init__(self, version: CarriedVersion, open_hop: OpenHop, *, delta: bool) -> None:
        """Open the hop. `delta`: send deltas where they are smaller. Raises HopError."""
        self.finished = False  # the neighbour has said that it has all
        self.delta = delta
        self._version = version
        self._table: ChunkTable | None = None  # as the neighbour cuts the version
        self._want: Want | None = None  # the last one
        self._pending: deque[Want] = deque()  # cannot be followed yet
        self._layout_due = False
        self._waiting: NDArray[np.bool_] = np.zeros(0, np.bool_)  # bool [chunks]: wanted, and not here yet
        self._full_only: NDArray[np.bool_] = np.zeros(0, np.bool_)  # bool [chunks]
        self._handed: NDArray[np.bool_] = np.zeros(0, np.bool_)  # bool [chunks]
        self._ready: deque[int] = deque()  # wanted, and here
        self._seen = 0  # length of the log of checked chunks that was looked at
        self._bases: tuple[int, ...] = ()  # that the neighbour holds
        self.sent = 0  # different chunks that were given to the hop
        self._hop = open_hop(self._place)

    @property
    def peer(self) -> str:
        """Name of the neighbour."""
        return self._hop.peer

    def advance(self) -> bool:
        """Do what can be done without waiting; false if that was nothing. Raises HopError when the neighbour is lost."""
        if self.finished:
            return False
        progressed = self._take_frames()
        if self._layout_due and self._version.layout is not None:
            self._layout_due = False
            self._send_layout(self._version.layout_raw, self._version.layout_checksum)
            progressed = True
        while self._pending and self._follow(self._pending[0]):
            self._pending.popleft()
        self._look_at_the_log()
        queued = False
        while not self.finished and self._ready and self._hop.unsent < WINDOW:
            self._send_chunk(self._ready.popleft())
            queued = True
        if queued:
            self._hop.advance()
        return progressed or queued

    def close(self) -> None:
        """Give the hop up."""
        self._hop.close()

    def _place(self, head: FrameHead) -> Bytes:
        if head.kind is not FrameKind.WANT or head.nbytes > MAX_WANT_BYTES:
            raise HopError(f"{self.peer} sends {head.kind.name} with {head.nbytes} bytes, which a receiver never does")
        return np.empty(head.nbytes, np.uint8)

    def _take_frames(self) -> bool:
        progressed = self._hop.advance()
        for _ in range(FRAMES_PER_TURN):
            frame = self._hop.receive()
            if frame is None:
                break
            progressed = True
            self._take(*frame)
        return progressed

    def _take(self, head: FrameHead, payload: Bytes) -> None:
        if head.policy_version != self._version.policy_version:
            raise HopError(
                f"{self.peer} speaks of version {head.policy_version}, expected {self._version.policy_version}"
            )
        if head.kind is FrameKind.DONE:
            self.finished = True
            return
        if head.kind is not FrameKind.WANT or checksum(payload) != head.checksum:
            raise HopError(f"{self.peer} sends {head.kind.name} that is damaged, or that a receiver never sends")
        want = Want.unpack(payload, self.peer)
        self._send_layout(np.empty(0, np.uint8), 0)
        if want.layout_checksum is None:
            self._layout_due = True
        else:
            self._pending.append(want)

    def _follow(self, want: Want) -> bool:
        """Queue what is wanted; false if it is not known yet how the version is cut."""
        version = self._version
        if version.layout is None:
            return False
        if want.layout_checksum != version.layout_checksum:
            raise HopError(f"{self.peer} has another layout of version {version.policy_version}")
        if self._want is None or self._table is None or want.chunk_bytes != self._want.chunk_bytes:
            self._table = version.table_for(want.chunk_bytes)
            if self._table is None:
                return False  # cut otherwise than here: only the complete version can be cut anew
            count = len(self._table.spans)
            self._waiting, self._full_only, self._handed = (np.zeros(count, np.bool_) for _ in range(3))
            self._ready.clear()
        if len(want.chunks) != len(self._table.spans):
            raise HopError(f"{self.peer} wants {len(want.chunks)} chunks of a version with {len(self._table.spans)}")
        self._want = want
        self._bases = want.bases or self._bases
        self._full_only[want.chunks] = not want.bases
        here = np.flatnonzero(want.chunks & self._table.checked)
        self._waiting |= want.chunks
        self._waiting[here] = False
        self._ready.extend(here.tolist())
        return True

    def _look_at_the_log(self) -> None:
        """Chunks that were waited for may have come."""
        if self._table is None:
            return
        log = self._table.log
        for index in log[self._seen :]:
            if self._waiting[index]:
                self._waiting[index] = False
                self._ready.append(index)
        self._seen = len(log)

    def _send_layout(self, raw: Bytes, raw_checksum: int) -> None:
        head = FrameHead(
            kind=FrameKind.LAYOUT,
            policy_version=self._version.policy_version,
            nbytes=raw.nbytes,
            checksum=raw_checksum,
        )
        self._hop.send(head, raw)

    def _send_chunk(self, index: int) -> None:
        assert self._table is not None
        table, version = self._table, self._version
        if not table.checked[index]:  # found damaged since
            self._waiting[index] = True
            return
        result = version.checksum(table, index)
        delta = None if self._full_only[index] else self._delta_of(index)
        payload = version.memory(table.spans[index]) if delta is None else delta.payload
        head = FrameHead(
            kind=FrameKind.CHUNK,
            policy_version=version.policy_version,
            nbytes=payload.nbytes,
            checksum=result if delta is None else delta.checksum,
            index=index,
            base=FULL if delta is None else delta.base,
            result_checksum=result,
        )
        self._hop.send(head, payload)
        version.forget_delta(index)
        self.sent += not self._handed[index]
        self._handed[index] = True

    def _delta_of(self, index: int) -> Delta | None:
        """The chunk as a delta on a base that the neighbour has, if that is smaller."""
        version, table = self._version, self._table
        own_cut = table is version.table
        kept = version.kept_delta(index) if own_cut else None
        if kept is not None and kept.base in self._bases:
            return kept
        if not self.delta or table is None:
            return None
        start, stop = table.spans[index]
        for policy_version in sorted(self._bases, reverse=True):
            base = version.base(policy_version)
            if base is not None and policy_version != version.policy_version:
                width = version.element_bytes(index) if own_cut else 2
                payload = encode_chunk(version.memory((start, stop)), base[start:stop], width)
                if payload is None:
                    return None
                return Delta(base=policy_version, payload=payload, checksum=checksum(payload))
        return None

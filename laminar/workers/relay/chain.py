"""A version on its way through one relay: chunks come in from the left, are checked, and go out to the right.

    upstream neighbour --> [receives posted ahead] --> checked chunks of the version's own file --> downstream neighbour

Invariants:
- The file's memory is the receive buffer and the send buffer: no chunk is copied inside the relay.
- A chunk is forwarded, and counts towards the commit, only after its checksum holds; nothing else becomes visible.
- `advance` never blocks. It owns no thread and no clock, so tests can step it.

On the wire, in order: a header of fixed size, the layout (msgpack), then for each chunk its index and checksum (two
uint64) and its bytes. The header is checked against what the controller announced, so a neighbour that carries something
else is found before any memory is reserved.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from laminar.weights.checksum import checksum
from laminar.weights.layout import WeightLayout, chunk_spans
from laminar.weights.store import WeightStore
from laminar.weights.version_file import VersionWriter
from laminar.workers.relay.transport import Hop, HopRequest

POSTED_AHEAD = 4  # chunks under way on one hop; more did not help
MAX_CHUNK_BYTES = 1 << 30
MAX_LAYOUT_BYTES = 1 << 28

# magic, policy version, epoch, chunk bytes, total bytes, layout bytes, checksum of the layout
_HEADER = struct.Struct("<8sQQQQQQ")
_MAGIC = b"LAMCHAIN"


class TransferError(Exception):
    """The version cannot be carried on; says which neighbour, which chunk, and why."""


class ChainTransfer:
    """This relay's part in one broadcast."""

    def __init__(
        self,
        *,
        store: WeightStore,
        policy_version: int,
        epoch: int,
        chunk_bytes: int,
        upstream: Hop | None,
        downstream: Hop | None,
    ) -> None:
        """Prepare; the hops are not touched before the first `advance`.

        Args:
            store: where the version is (head of the chain) or will be (all others).
            policy_version: what is carried.
            epoch: number of this broadcast, the same at all relays.
            chunk_bytes: size of a chunk, the same at all relays.
            upstream: None at the head, which must hold the version.
            downstream: None at the tail.

        Raises:
            TransferError: the head does not hold the version, or the chunk size is not between 1 byte and 1 GiB.
        """
        if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise TransferError(f"chunks of {chunk_bytes} bytes; expected 1 to {MAX_CHUNK_BYTES}")
        self.policy_version = policy_version
        self.stored = False  # the version is complete and visible in the store
        self.layout: WeightLayout | None = None  # None until known
        self.nbytes = 0  # size of the version, 0 until known
        self.spans: list[tuple[int, int]] = []  # of the chunks, in bytes; empty until known
        self._store = store
        self._epoch = epoch
        self._chunk_bytes = chunk_bytes
        self._upstream = upstream
        self._downstream = downstream
        self._layout_raw: NDArray[np.uint8] | None = None  # uint8 [layout bytes], None until known
        self._buffer: NDArray[np.uint8] = np.empty(0, np.uint8)  # uint8 [nbytes], the version's file
        self._heads: NDArray[np.uint64] = np.empty((0, 2), np.uint64)  # uint64 [chunks, 2]: index, checksum
        self._checked = 0  # chunks that may be forwarded
        self._sent = 0
        self._writer: VersionWriter | None = None
        self._running: list[Iterator[bool]] = []
        if upstream is None:
            self._open_held_version()
        else:
            self._running.append(self._receive(upstream))
        if downstream is not None:
            self._running.append(self._send(downstream))

    @property
    def done(self) -> bool:
        """Nothing left to receive or to forward."""
        return not self._running

    def advance(self) -> bool:
        """Do what can be done without waiting; False if that was nothing.

        Raises:
            TransferError: a damaged chunk, or a neighbour that carries something else.
            HopError: a neighbour is lost.
            UserError: the shared memory is too small for the version.
            FileExistsError: the store holds the version already.
        """
        progressed = False
        for steps in tuple(self._running):
            try:
                progressed |= next(steps)
            except StopIteration:
                self._running.remove(steps)
                progressed = True
        return progressed

    def close(self) -> None:
        """Give everything back; an incomplete version is discarded."""
        self._running.clear()
        for hop in (self._upstream, self._downstream):
            if hop is not None:
                hop.abandon()
        if self._writer is not None:
            self._writer.discard()
        self._buffer = np.empty(0, np.uint8)

    def waiting_for(self) -> str:
        """Which neighbour has not done what, for the message when the time is up."""
        parts = []
        chunks = len(self.spans) or "?"
        if self._upstream is not None and not self.stored:
            parts.append(f"{self._upstream.peer} has sent {self._checked} of {chunks} chunks")
        if self._downstream is not None and (not self.spans or self._sent < len(self.spans)):
            parts.append(f"{self._downstream.peer} has taken {self._sent} of {chunks} chunks")
        return ", ".join(parts)

    def _open_held_version(self) -> None:
        """Head of the chain: map the version; its checksums are taken as the chunks are sent."""
        try:
            reader = self._store.open(self.policy_version)
        except FileNotFoundError as error:
            raise TransferError(
                f"the head of the chain does not hold version {self.policy_version} (its store has "
                f"{self._store.versions()})"
            ) from error
        with reader:
            self._know(np.frombuffer(reader.layout.to_bytes(), np.uint8), reader.layout, reader.buffer)
        self._checked = len(self.spans)
        self.stored = True

    def _know(self, layout_raw: NDArray[np.uint8], layout: WeightLayout, buffer: NDArray[np.uint8]) -> None:
        self.layout = layout
        self.nbytes = layout.total_bytes
        self.spans = chunk_spans(layout.total_bytes, self._chunk_bytes)
        self._buffer = buffer
        self._heads = np.empty((len(self.spans), 2), np.uint64)
        self._layout_raw = layout_raw

    def _receive(self, hop: Hop) -> Iterator[bool]:
        """Header, layout, chunks, commit. Yields whether it got further."""
        header = np.empty(_HEADER.size, np.uint8)
        yield from _complete(hop.receive(header))
        layout_bytes, layout_checksum = self._check_header(header.tobytes(), hop)
        layout_raw = np.empty(layout_bytes, np.uint8)
        yield from _complete(hop.receive(layout_raw))
        if checksum(layout_raw) != layout_checksum:
            raise TransferError(f"version {self.policy_version}: the layout from {hop.peer} is damaged")
        try:
            layout = WeightLayout.from_bytes(layout_raw.tobytes())
        except ValueError as error:
            raise TransferError(f"version {self.policy_version} from {hop.peer}: {error}") from error
        self._writer = self._store.begin(self.policy_version, layout)
        self._know(layout_raw, layout, self._writer.buffer)

        posted: deque[tuple[HopRequest, HopRequest]] = deque()
        while self._checked < len(self.spans):
            while len(posted) < POSTED_AHEAD and self._checked + len(posted) < len(self.spans):
                index = self._checked + len(posted)
                start, stop = self.spans[index]
                posted.append((hop.receive(self._heads[index]), hop.receive(self._buffer[start:stop])))
            arrived = _both(posted[0])
            if arrived:
                posted.popleft()
                self._check_chunk(self._checked, hop)
                self._checked += 1
            yield arrived
        self._writer.commit()
        self.stored = True

    def _send(self, hop: Hop) -> Iterator[bool]:
        """Header, layout, and each chunk once it is checked. Yields whether it got further."""
        while self._layout_raw is None:
            yield False
        header = _HEADER.pack(
            _MAGIC,
            self.policy_version,
            self._epoch,
            self._chunk_bytes,
            self.nbytes,
            len(self._layout_raw),
            checksum(self._layout_raw),
        )
        yield from _complete(hop.send(np.frombuffer(header, np.uint8)))
        yield from _complete(hop.send(self._layout_raw))
        under_way: deque[tuple[HopRequest, HopRequest]] = deque()
        while self._sent < len(self.spans):
            progressed = False
            index = self._sent + len(under_way)
            if len(under_way) < POSTED_AHEAD and index < self._checked:
                start, stop = self.spans[index]
                chunk = self._buffer[start:stop]
                if self._upstream is None:
                    self._heads[index] = index, checksum(chunk)
                under_way.append((hop.send(self._heads[index]), hop.send(chunk)))
                progressed = True
            if under_way and _both(under_way[0]):
                under_way.popleft()
                self._sent += 1
                progressed = True
            yield progressed

    def _check_header(self, header: bytes, hop: Hop) -> tuple[int, int]:
        """(layout bytes, layout checksum)."""
        magic, policy_version, epoch, chunk_bytes, _, layout_bytes, layout_checksum = _HEADER.unpack(header)
        found = (magic, policy_version, epoch, chunk_bytes)
        expected = (_MAGIC, self.policy_version, self._epoch, self._chunk_bytes)
        if found != expected or layout_bytes > MAX_LAYOUT_BYTES:
            raise TransferError(
                f"{hop.peer} carries something else: header {found} with a layout of {layout_bytes} bytes, "
                f"expected {expected}"
            )
        return layout_bytes, layout_checksum

    def _check_chunk(self, index: int, hop: Hop) -> None:
        start, stop = self.spans[index]
        found = checksum(self._buffer[start:stop])
        announced_index, announced = (int(value) for value in self._heads[index])
        if announced_index != index or announced != found:
            raise TransferError(
                f"version {self.policy_version}: chunk {index} of {len(self.spans)} from {hop.peer} is damaged "
                f"(announced as chunk {announced_index} with checksum {announced:016x}, arrived with {found:016x})"
            )


def _complete(request: HopRequest) -> Iterator[bool]:
    while not request.test():
        yield False
    yield True


def _both(requests: tuple[HopRequest, HopRequest]) -> bool:
    """Whether head and bytes of a chunk are complete. Both are tested, so that both are driven on."""
    head, data = (request.test() for request in requests)
    return head and data

"""The downstream end of a hop: asks for what is missing of a version, checks what comes, and commits it.

    WANT layout -->  <-- LAYOUT      WANT chunks -->  <-- CHUNK, CHUNK, ...      DONE -->

The sender answers every WANT at once with an empty LAYOUT, whatever else it has to send: half of that is the hop's latency.

Invariant: the memory of a checked chunk, and memory that another frame is arriving in, is never written to.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from laminar.errors import UserError
from laminar.weights.checksum import checksum
from laminar.weights.delta import apply_chunk
from laminar.workers.relay.carried_version import CarriedVersion, Delta
from laminar.workers.relay.hop import FULL, Bytes, FrameHead, FrameKind, Hop, HopError, Place
from laminar.workers.relay.want import Want

OpenHop = Callable[[Place], Hop]
TakeChecksum = Callable[[Bytes], "Future[int]"]
"""Takes a chunk's checksum, at once or while the caller goes on; the bytes do not change meanwhile."""

MAX_DAMAGED = 3  # times that one chunk may come damaged on one hop
MAX_LAYOUT_BYTES = 1 << 28
FRAMES_PER_TURN = 4
PAUSE_FACTOR = 8  # a gap between two chunks that is so many times the mean: the sender had none


@dataclass(kw_only=True, slots=True)
class Reception:
    """How receiving a version has gone so far, over all hops that it came by."""

    damaged: int = 0  # chunks that came damaged
    nbytes: int = 0  # of payloads that came over the wire
    latency_s: float = 0.0  # one way, of a small frame; the shortest seen, 0 if unknown
    flowing_s: float = 0.0  # while chunks kept coming
    flowing_bytes: int = 0  # of the version (as deltas they are fewer on the wire) that came in that time
    gaps: int = 0  # that time is made of

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the version per second while chunks kept coming; 0 if unknown."""
        return self.flowing_bytes / self.flowing_s if self.flowing_s > 0 else 0.0

    def answered(self, seconds: float) -> None:
        """A question was answered after so long."""
        self.latency_s = min(self.latency_s or seconds / 2, seconds / 2)

    def flowed(self, gap: float, nbytes: int) -> None:
        """A chunk came so long after the one before it."""
        if gap <= 0.0:  # several were taken in one turn
            self.flowing_bytes += nbytes
        elif not self.gaps or gap <= PAUSE_FACTOR * self.flowing_s / self.gaps:
            self.flowing_s += gap
            self.flowing_bytes += nbytes
            self.gaps += 1


def taken_at_once(data: Bytes) -> Future[int]:
    """The checksum, in the thread that asks."""
    taken: Future[int] = Future()
    taken.set_result(checksum(data))
    return taken


class Receiver:
    """Receives one version from one upstream neighbour."""

    def __init__(
        self,
        version: CarriedVersion,
        open_hop: OpenHop,
        reception: Reception,
        take_checksum: TakeChecksum,
        *,
        delta: bool,
    ) -> None:
        """Open the hop; nothing is asked before the first `advance`.

        Args:
            version: what is received.
            open_hop: opens the hop.
            reception: told how it goes.
            take_checksum: for chunks that came into the version's own memory.
            delta: deltas are welcome.

        Raises:
            HopError: the hop cannot be opened.
        """
        self.finished = False  # the neighbour knows that all is here
        self.keep_deltas = False  # somebody waits for them to be forwarded
        self._version = version
        self._reception = reception
        self._take_checksum = take_checksum
        self._delta = delta
        self._asked: deque[float] = deque()  # when, for each WANT that is not answered
        self._arriving: set[int] = set()  # chunks whose own memory a frame is arriving in, until it is checked
        self._checking: deque[tuple[FrameHead, Future[int]]] = deque()  # have arrived
        self._damaged: Counter[int] = Counter()
        self._begun = False
        self._no_memory: UserError | None = None  # for a chunk that was about to arrive
        self._said_done = False
        self._last_chunk: float | None = None
        self._hop = open_hop(self._place)

    @property
    def peer(self) -> str:
        """Name of the neighbour."""
        return self._hop.peer

    def advance(self, now: float) -> bool:
        """Do what can be done without waiting; false if that was nothing.

        Raises:
            HopError: the neighbour is lost.
            UserError, ValueError, OSError: this relay cannot store the version (`CarriedVersion`).
        """
        try:
            return not self.finished and self._advance(now)
        except HopError:
            if self._no_memory is not None:
                raise self._no_memory from None
            raise

    def _advance(self, now: float) -> bool:
        if not self._begun:
            self._begun = True
            if not self._version.stored:
                self._ask_for_the_rest(now)
        progressed = False if self._said_done else self._take_frames(now) | self._take_checked(now)
        version = self._version
        if version.layout is not None and not version.table.missing and not version.stored:
            for index in version.commit():
                self._ask_again(index, now, full=False)
        if version.stored and not self._said_done:
            self._said_done = progressed = True
            self._hop.send(FrameHead(kind=FrameKind.DONE, policy_version=version.policy_version))
        if self._said_done:
            progressed |= self._say_done()
        return progressed

    def close(self) -> None:
        """Give the hop up; what has been received stays."""
        self._hop.close()
        for index in self._arriving:
            self._version.suspect(index)
        self._arriving.clear()
        self._checking.clear()

    def _say_done(self) -> bool:
        """Bring the DONE on its way; a neighbour that does not wait for it is no loss."""
        try:
            progressed = self._hop.advance()
            self.finished = self._hop.unsent == 0
        except HopError:
            progressed = self.finished = True
        return progressed

    def _take_frames(self, now: float) -> bool:
        progressed = self._hop.advance()
        for _ in range(FRAMES_PER_TURN):
            frame = self._hop.receive()
            if frame is None:
                break
            progressed = True
            head, payload = frame
            self._reception.nbytes += payload.nbytes
            if head.policy_version != self._version.policy_version:
                raise HopError(
                    f"{self.peer} speaks of version {head.policy_version}, expected {self._version.policy_version}"
                )
            match head.kind:
                case FrameKind.LAYOUT if payload.nbytes:
                    self._take_layout(head, payload, now)
                case FrameKind.LAYOUT:
                    if self._asked:
                        self._reception.answered(now - self._asked.popleft())
                case FrameKind.CHUNK:
                    self._take_chunk(head, payload, now)
                case _:
                    raise HopError(f"{self.peer} sends {head.kind.name}, which a sender never does")
        return progressed

    def _place(self, head: FrameHead) -> Bytes:
        """Where a payload is to arrive. Raises HopError for one that nobody asked for."""
        version = self._version
        if head.kind is FrameKind.LAYOUT and head.nbytes <= MAX_LAYOUT_BYTES:
            return np.empty(head.nbytes, np.uint8)
        if head.kind is not FrameKind.CHUNK or head.policy_version != version.policy_version:
            raise HopError(
                f"{self.peer} sends {head.kind.name} of version {head.policy_version} with {head.nbytes} bytes, "
                f"expected chunks of version {version.policy_version}"
            )
        table = version.table
        if head.index >= len(table.spans):
            raise HopError(f"{self.peer} sends chunk {head.index} of a version with {len(table.spans)} chunks")
        start, stop = table.spans[head.index]
        if head.nbytes != stop - start and (head.base == FULL or head.nbytes > stop - start):
            raise HopError(f"{self.peer} sends {head.nbytes} bytes for chunk {head.index}, expected {stop - start}")
        if head.base != FULL or table.checked[head.index] or head.index in self._arriving or version.stored:
            return np.empty(head.nbytes, np.uint8)
        try:
            memory = version.reserved((start, stop))
        except UserError as error:
            self._no_memory = error
            raise HopError(f"no memory for what {self.peer} sends") from error
        self._arriving.add(head.index)
        return memory

    def _take_layout(self, head: FrameHead, payload: Bytes, now: float) -> None:
        if self._version.layout is not None:
            return
        if checksum(payload) != head.checksum:
            self._reception.damaged += 1
            self._damaged[-1] += 1
            if self._damaged[-1] > MAX_DAMAGED:
                raise HopError(f"{self.peer}: the layout came damaged {self._damaged[-1]} times")
        else:
            self._version.learn_layout(payload)
        self._ask_for_the_rest(now)

    def _take_chunk(self, head: FrameHead, payload: Bytes, now: float) -> None:
        index, table = head.index, self._version.table
        if index >= len(table.spans):
            raise HopError(f"{self.peer} sends chunk {index} of a version with {len(table.spans)} chunks")
        if table.checked[index]:
            return  # once is enough
        chunk = self._version.reserved(table.spans[index])
        in_place = np.may_share_memory(payload, chunk)
        if index in self._arriving and not in_place:
            return
        if self._last_chunk is not None:
            self._reception.flowed(now - self._last_chunk, len(chunk))
        self._last_chunk = now
        if in_place:
            self._checking.append((head, self._take_checksum(payload)))
        elif checksum(payload) != head.checksum:
            self._ask_again(index, now, full=False)
        elif head.base == FULL:
            chunk[:] = payload
            self._version.check(index, head.checksum)
        elif self._apply(head, payload, chunk):
            self._version.check(index, head.result_checksum)
            if self.keep_deltas:
                self._version.keep_delta(index, Delta(base=head.base, payload=payload, checksum=head.checksum))
        else:
            self._ask_again(index, now, full=True)

    def _take_checked(self, now: float) -> bool:
        """Chunks whose checksum is known by now; false if there were none."""
        progressed = False
        while self._checking and self._checking[0][1].done():
            head, found = self._checking.popleft()
            self._arriving.discard(head.index)
            if found.result() == head.checksum:
                self._version.check(head.index, head.checksum)
            else:
                self._ask_again(head.index, now, full=False)
            progressed = True
        return progressed

    def _apply(self, head: FrameHead, payload: Bytes, chunk: Bytes) -> bool:
        """Whether the delta made the chunk that it should."""
        base = self._version.base(head.base)
        if base is None:
            return False
        start, stop = self._version.table.spans[head.index]
        try:
            apply_chunk(payload, base[start:stop], chunk)
        except ValueError:
            return False
        return checksum(chunk) == head.result_checksum

    def _ask_again(self, index: int, now: float, *, full: bool) -> None:
        self._reception.damaged += 1
        self._damaged[index] += 1
        if self._damaged[index] > MAX_DAMAGED:
            raise HopError(
                f"{self.peer}: chunk {index} of version {self._version.policy_version} came damaged "
                f"{self._damaged[index]} times"
            )
        chunks = np.zeros(len(self._version.table.spans), np.bool_)
        chunks[index] = True
        self._ask(chunks, now, bases=not full)

    def _ask_for_the_rest(self, now: float) -> None:
        self._ask(~self._version.table.checked, now, bases=True)

    def _ask(self, chunks: np.ndarray, now: float, *, bases: bool) -> None:
        version = self._version
        want = Want(
            chunk_bytes=version.chunk_bytes,
            layout_checksum=None if version.layout is None else version.layout_checksum,
            chunks=chunks,
            bases=version.bases() if bases and self._delta else (),
        )
        payload = want.pack()
        head = FrameHead(
            kind=FrameKind.WANT,
            policy_version=version.policy_version,
            nbytes=payload.nbytes,
            checksum=checksum(payload),
        )
        self._asked.append(now)
        self._hop.send(head, payload)

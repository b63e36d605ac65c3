"""Exported KV from one host to another: the exporter's door, and the importer that dials it.

A TCP hop of the relays' (`workers/relay/tcp_hop.py`) carries one export once, under the epoch that its reference names: only
who knows the run's key is let in. The exporter says the sizes of the files (LAYOUT); the importer makes room and asks for them
(WANT); the exporter sends their bytes in chunks with checksums (CHUNK, in order), and is told that all are there (DONE).
Invariant: a file that `fetch` has put in place is complete and undamaged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laminar.protocol.messages import KvReference
from laminar.weights.checksum import checksum
from laminar.workers.relay.hop import Bytes, FrameHead, FrameKind, Hop, HopError
from laminar.workers.relay.tcp_door import TcpDoor
from laminar.workers.relay.tcp_hop import TcpHop
from laminar.workers.rollout.kv_file import HiddenKvFile, shard_path
from laminar.workers.rollout.kv_folder import KvFolder

CHUNK_BYTES = 4 << 20
MAX_SHARDS = 64
HANDED_OUT_AT_ONCE = 4
LIMIT_S = 30.0  # for one export to go over; then it is prefilled

log = logging.getLogger("laminar.rollout")


@dataclass(kw_only=True, slots=True)
class _Offer:
    """An export that waits for an importer who dials."""

    hop: TcpHop
    policy_version: int
    files: list[Path]


class KvDoor:
    """Hands exports out to rollouts of other hosts. Lives on the event loop; each hand-over has a thread of its own."""

    def __init__(self, host: str, hop_key: bytes, folder: KvFolder) -> None:
        """Listen at this numeric address."""
        self._door = TcpDoor(host, hop_key)
        self._folder = folder
        self._offers: dict[str, _Offer] = {}  # by name of the export
        self._handing_out: set[asyncio.Task[None]] = set()
        # Threads of their own: where all wait that fetch, here and there, nobody would be left to hand out.
        self._threads = ThreadPoolExecutor(HANDED_OUT_AT_ONCE, thread_name_prefix="hand-out")
        self._epoch = 0
        self.address = self._door.address(host)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._door.fileno(), self._look)

    def offer(self, name: str, policy_version: int, shards: int) -> int:
        """Expect an importer of this export; returns the epoch that it has to dial with."""
        self._epoch += 1
        path = self._folder.path(name)
        self._offers[name] = _Offer(
            hop=self._door.hop(self._epoch, f"the importer of {name}", _no_payload),
            policy_version=policy_version,
            files=[shard_path(path, shard) for shard in range(shards)],
        )
        return self._epoch

    def withdraw(self, name: str) -> None:
        """Nobody will import it from here any more."""
        offer = self._offers.pop(name, None)
        if offer is not None:
            offer.hop.close()

    async def close(self) -> None:
        """Let nobody in any more, and give up what is under way."""
        self._loop.remove_reader(self._door.fileno())
        for name in list(self._offers):
            self.withdraw(name)
        self._door.close()
        for task in self._handing_out:
            task.cancel()
        if self._handing_out:
            await asyncio.wait(self._handing_out)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> None:
        self._door.advance()
        for name, offer in list(self._offers.items()):
            if offer.hop.fileno() != self._door.fileno():  # its importer is here
                del self._offers[name]
                task = asyncio.create_task(self._hand_out(name, offer), name=f"hand out {name}")
                self._handing_out.add(task)
                task.add_done_callback(self._handing_out.discard)

    async def _hand_out(self, name: str, offer: _Offer) -> None:
        try:
            await self._loop.run_in_executor(self._threads, _send, offer)
            self._folder.remove(name)
        except (HopError, OSError) as error:  # the importer prefills; the controller has the export dropped
            log.warning("%s was not handed out: %s", name, error)


def _send(offer: _Offer) -> None:
    """Raises HopError or OSError."""
    until = time.monotonic() + LIMIT_S
    with contextlib.closing(offer.hop) as hop:
        mapped = [np.memmap(path, np.uint8, mode="r") for path in offer.files]
        sizes = np.array([file.nbytes for file in mapped], np.int64).view(np.uint8)
        chunks = [(file, start) for file in mapped for start in range(0, file.nbytes, CHUNK_BYTES)]
        version = offer.policy_version
        head = FrameHead(
            kind=FrameKind.LAYOUT,
            policy_version=version,
            nbytes=sizes.nbytes,
            checksum=checksum(sizes),
            index=len(chunks),
        )
        hop.send(head, sizes)
        _expect(hop, FrameKind.WANT, until)
        for index, (file, start) in enumerate(chunks):
            payload = np.asarray(file[start : start + CHUNK_BYTES])
            head = FrameHead(
                kind=FrameKind.CHUNK,
                policy_version=version,
                nbytes=payload.nbytes,
                checksum=checksum(payload),
                index=index,
            )
            hop.send(head, payload)
        _expect(hop, FrameKind.DONE, until)


def fetch(reference: KvReference, hop_key: bytes, path: Path) -> None:
    """Bring the export here, to `path`; blocks until it is there.

    Raises:
        HopError: the exporter cannot be reached, does not have it (any more), or has sent something else.
        OSError: no memory for it.
    """
    until = time.monotonic() + LIMIT_S
    receiver = _Receiver(path)
    with contextlib.ExitStack() as stack:
        hop = TcpHop.dial(reference.address, reference.epoch, hop_key, reference.exporter, receiver.place)
        stack.enter_context(contextlib.closing(hop))
        stack.push(receiver.discard)
        receiver.make_room(*_receive(hop, until))
        hop.send(FrameHead(kind=FrameKind.WANT, policy_version=reference.policy_version))
        while not receiver.complete:
            receiver.take(*_receive(hop, until))
        receiver.commit()
        hop.send(FrameHead(kind=FrameKind.DONE, policy_version=reference.policy_version))
        while hop.unsent:
            _wait(hop, until)


class _Receiver:
    """Files that arrive chunk by chunk, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: list[HiddenKvFile] = []
        self._pieces: Iterator[Bytes] = iter(())  # memory of the chunks to come
        self._chunks = -1  # unknown
        self._taken = 0

    @property
    def complete(self) -> bool:
        """Whether every chunk is here."""
        return self._taken == self._chunks

    def place(self, head: FrameHead) -> Bytes:
        """Memory for a frame's payload."""
        if head.kind is FrameKind.LAYOUT and self._chunks < 0 and head.nbytes <= 8 * MAX_SHARDS:
            return np.empty(head.nbytes, np.uint8)
        piece = next(self._pieces, None)
        if head.kind is not FrameKind.CHUNK or piece is None or piece.nbytes != head.nbytes:
            raise HopError(f"a frame {head.kind.name} of {head.nbytes} bytes that does not belong here")
        return piece

    def take(self, head: FrameHead, payload: Bytes) -> None:
        """A chunk is here. Raises HopError if it is damaged."""
        if checksum(payload) != head.checksum:
            raise HopError(f"chunk {head.index} came damaged")
        self._taken += 1

    def make_room(self, head: FrameHead, payload: Bytes) -> None:
        """The sizes of the files are here. Raises OSError if there is no memory for them."""
        if head.kind is not FrameKind.LAYOUT or checksum(payload) != head.checksum:
            raise HopError(f"a frame {head.kind.name} where a sound LAYOUT was expected")
        pieces = []
        for shard, nbytes in enumerate(payload.view(np.int64).tolist()):
            file = HiddenKvFile(shard_path(self._path, shard), nbytes)
            self._files.append(file)
            memory = np.frombuffer(file.map, np.uint8)
            pieces += [memory[start : start + CHUNK_BYTES] for start in range(0, nbytes, CHUNK_BYTES)]
        self._pieces, self._chunks = iter(pieces), len(pieces)

    def commit(self) -> None:
        """All of it is here."""
        self._pieces = iter(())
        for file in self._files:
            file.commit()

    def discard(self, *exit_arguments: object) -> None:
        """Remove what was not committed."""
        self._pieces = iter(())
        for file in self._files:
            file.__exit__(None, None, None)


def _expect(hop: Hop, kind: FrameKind, until: float) -> None:
    head, _ = _receive(hop, until)
    if head.kind is not kind:
        raise HopError(f"{hop.peer} says {head.kind.name} where {kind.name} was expected")


def _receive(hop: Hop, until: float) -> tuple[FrameHead, Bytes]:
    while True:
        frame = hop.receive()
        if frame is not None:
            return frame
        _wait(hop, until)


def _wait(hop: Hop, until: float) -> None:
    """Advance, or wait until that is possible. Raises HopError when the limit has passed."""
    assert isinstance(hop, TcpHop)
    if hop.advance():
        return
    poll = select.poll()
    poll.register(hop.fileno(), select.POLLIN | (select.POLLOUT if hop.wants_write else 0))
    left = until - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise HopError(f"{hop.peer} has not done its part within {LIMIT_S:g} s")


def _no_payload(head: FrameHead) -> Bytes:
    raise HopError(f"a payload of {head.nbytes} bytes, where none was expected")

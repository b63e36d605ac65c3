"""Hops over plain TCP: to a relay that is not of this mpirun world, and from the trainer.

The upstream end dials (`TcpHop.dial`), the downstream end takes the connection at its `TcpDoor`. A connection begins with
a preamble of fixed size: magic, epoch, and a keyed hash of the epoch.

Invariants:
- Nothing blocks and nothing has a thread.
- Payloads go from the memory given to `send`, and into the memory that `place` gave, with no copy of ours between.
- What arrived before the neighbour was lost is handed out before the loss is raised.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from laminar.workers.relay.hop import HEAD_BYTES, Bytes, FrameHead, HopError, Place

FRAMES_AHEAD = 4  # arrived frames that may wait for `receive` before no more is read
TURN_BYTES = 4 << 20  # per direction in one `advance`, so that a relay's other hop gets its turn
TURN_CALLS = 16  # socket calls per direction in one `advance`
CONNECT_LIMIT_S = 5.0

PREAMBLE = struct.Struct("<8sQ32s")
_MAGIC = b"LAMHOP01"
_CONNECTING = (errno.EINPROGRESS, errno.EALREADY)
_CONNECTED = (0, errno.EISCONN)


def preamble(epoch: int, hop_key: bytes) -> bytes:
    """What the dialling end sends first."""
    proof = hashlib.blake2b(_MAGIC + epoch.to_bytes(8, "little"), key=hop_key, digest_size=32).digest()
    return PREAMBLE.pack(_MAGIC, epoch, proof)


class Door(Protocol):
    """What is needed of `TcpDoor`."""

    def fileno(self) -> int:
        """Readable when `advance` has something to do."""
        ...

    def advance(self) -> None:
        """Let in whoever is at the door, without waiting."""
        ...

    def forget(self, hop: TcpHop) -> None:
        """The hop is given up before its neighbour came."""
        ...


@dataclass(kw_only=True, slots=True)
class _Dialling:
    """A connection that the other host has not answered yet."""

    address: str  # as given
    target: tuple[str, int]  # as the system takes it
    until: float  # time.monotonic(); given up then


class TcpHop:
    """One neighbour, from one order of the controller to the next; see `hop.Hop`.

    `place` is asked for every payload that is not empty.
    """

    def __init__(self, peer: str, place: Place, connection: socket.socket | None, door: Door | None = None) -> None:
        """For `dial` and `TcpDoor.hop`; `connection` is None as long as the neighbour has not dialled in at `door`."""
        self.peer = peer
        self._place = place
        self._socket = connection
        self._door = door
        self._dialling: _Dialling | None = None  # None: it is connected, or the neighbour dials
        self._lost: str | None = None
        self._deaf: str | None = None  # why the neighbour takes no more
        self._queue: deque[tuple[memoryview, bool]] = deque()  # still to send; whether a frame ends with it
        self._unsent = 0
        self._head_memory = memoryview(bytearray(HEAD_BYTES))
        self._head: FrameHead | None = None  # of the frame whose payload is arriving
        self._memory: Bytes = np.empty(0, np.uint8)  # for that payload
        self._into = self._head_memory  # what is to be filled next
        self._arrived: deque[tuple[FrameHead, Bytes]] = deque()

    @classmethod
    def dial(cls, address: str, epoch: int, hop_key: bytes, peer: str, place: Place) -> TcpHop:
        """The upstream end: start to connect to the neighbour's door at `address` (numeric host:port).

        Raises:
            HopError: the address is none, or nothing can be reached from here.
        """
        family, target = _parse(address, peer)
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        # No sizes for its buffers: the system lets them grow further than it lets us set them, and 4 MiB were no faster.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = connection.connect_ex(target)
        if code not in (*_CONNECTING, *_CONNECTED):
            connection.close()
            raise HopError(f"{peer} cannot be reached at {address}: {_reason(code)}")
        hop = cls(peer, place, connection)
        hop._dialling = _Dialling(address=address, target=target, until=time.monotonic() + CONNECT_LIMIT_S)
        hop._queue.append((memoryview(preamble(epoch, hop_key)), False))
        return hop

    @property
    def unsent(self) -> int:
        """Frames given to `send` whose memory may not be changed yet."""
        return self._unsent

    @property
    def wants_write(self) -> bool:
        """Whether `advance` can go on when `fileno` becomes writable; when it becomes readable, it always can."""
        return self._socket is not None and (self._dialling is not None or bool(self._queue))

    def fileno(self) -> int:
        """For select, poll or epoll; ask again after each `advance`, for the door's becomes the connection's."""
        if self._socket is not None:
            return self._socket.fileno()
        if self._door is None:
            raise ValueError("the hop is closed")
        return self._door.fileno()

    def send(self, head: FrameHead, payload: Bytes | None = None) -> None:
        """Queue a frame; the payload must stay as it is until the frame is no longer `unsent`."""
        nbytes = 0 if payload is None else payload.nbytes
        if nbytes != head.nbytes:
            raise ValueError(f"a head that speaks of {head.nbytes} bytes with a payload of {nbytes}")
        self._queue.append((memoryview(head.pack()), nbytes == 0))
        if payload is not None and nbytes:
            self._queue.append((payload.data, True))
        self._unsent += 1

    def receive(self) -> tuple[FrameHead, Bytes] | None:
        """The next frame that has arrived completely, with the memory that `place` gave for it."""
        return self._arrived.popleft() if self._arrived else None

    def advance(self) -> bool:
        """Do what can be done without waiting; false if that was nothing. Raises HopError when the neighbour is lost."""
        progressed = False
        if self._lost is None:
            try:
                if self._connected():
                    deaf = self._deaf
                    progressed = self._read()
                    if deaf and not progressed:
                        raise HopError(f"{self.peer} is lost: {deaf}")
                    progressed |= self._write()
            except HopError as error:
                self._lost = str(error)
        if self._lost is not None and not self._arrived:
            raise HopError(self._lost)
        return progressed

    def close(self) -> None:
        """Give up whatever is under way; what is no longer `unsent` still reaches a neighbour that lives."""
        if self._socket is not None:
            self._socket.close()
        elif self._door is not None:
            self._door.forget(self)
        self._socket = self._door = None
        self._lost = self._lost or f"the hop to {self.peer} is closed"
        self._queue.clear()
        self._arrived.clear()
        self._memory, self._into = np.empty(0, np.uint8), self._head_memory

    def take(self, connection: socket.socket) -> None:
        """The neighbour has dialled in (called by the door)."""
        self._socket, self._door = connection, None

    def _connected(self) -> bool:
        if self._socket is None:
            if self._door is not None:
                self._door.advance()
            return self._socket is not None
        dialling = self._dialling
        if dialling is None:
            return True
        code = self._socket.connect_ex(dialling.target)
        if code in _CONNECTED:
            self._dialling = None
            return True
        if code not in _CONNECTING:
            raise HopError(f"{self.peer} cannot be reached at {dialling.address}: {_reason(code)}")
        if time.monotonic() > dialling.until:
            raise HopError(f"{self.peer} has not answered at {dialling.address} within {CONNECT_LIMIT_S:g} s")
        return False

    def _read(self) -> bool:
        assert self._socket is not None
        room = TURN_BYTES
        for _ in range(TURN_CALLS):
            if len(self._arrived) >= FRAMES_AHEAD or not room:
                break
            try:
                count = self._socket.recv_into(self._into[:room])
            except BlockingIOError:
                break
            except OSError as error:
                raise HopError(f"{self.peer} is lost: {_reason(error.errno)}") from error
            if count == 0:
                raise HopError(f"{self.peer} is lost: it has closed the connection")
            room -= count
            self._into = self._into[count:]
            if not self._into.nbytes:
                self._part_arrived()
        return room < TURN_BYTES

    def _part_arrived(self) -> None:
        """A head or a payload is complete: say where the next bytes go."""
        if self._head is None:
            try:
                self._head = FrameHead.unpack(bytes(self._head_memory))
            except HopError as error:
                raise HopError(f"{self.peer} sends nonsense: {error}") from error
            if self._head.nbytes:
                self._memory = self._place(self._head)
                if self._memory.nbytes != self._head.nbytes:
                    raise ValueError(f"{self._memory.nbytes} bytes of memory for a payload of {self._head.nbytes}")
                self._into = self._memory.data
                return
            self._memory = np.empty(0, np.uint8)
        self._arrived.append((self._head, self._memory))
        self._head, self._into = None, self._head_memory

    def _write(self) -> bool:
        assert self._socket is not None
        room = TURN_BYTES
        for _ in range(TURN_CALLS):
            if not self._queue or not room or self._deaf:
                break
            try:
                count = self._socket.sendmsg(self._parts(room))
            except BlockingIOError:
                break
            except OSError as error:
                self._deaf = _reason(error.errno)  # not lost yet: what it has sent may still be here to be read
                break
            room -= count
            self._sent(count)
        return room < TURN_BYTES

    def _parts(self, room: int) -> list[memoryview]:
        """The next bytes to send, at most `room`."""
        parts = []
        for view, _ in islice(self._queue, 16):
            parts.append(view[:room])
            room -= parts[-1].nbytes
            if not room:
                break
        return parts

    def _sent(self, count: int) -> None:
        while count:
            view, last = self._queue[0]
            if count < view.nbytes:
                self._queue[0] = view[count:], last
                return
            count -= view.nbytes
            self._queue.popleft()
            self._unsent -= last


def _parse(address: str, peer: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Numeric host:port as the system takes it: a name could take seconds to look up, and all hops would wait."""
    host, _, port = address.rpartition(":")
    try:
        parsed = ipaddress.ip_address(host.strip("[]"))
        if not 0 < int(port) < 65536:
            raise ValueError(f"no port: {port}")
    except ValueError as error:
        raise HopError(f"{peer} cannot be reached at {address!r}: expected a numeric host:port ({error})") from error
    return socket.AF_INET if parsed.version == 4 else socket.AF_INET6, (str(parsed), int(port))


def _reason(code: int | None) -> str:
    return errno.errorcode.get(code or 0, str(code))

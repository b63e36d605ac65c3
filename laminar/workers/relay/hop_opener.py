"""From the controller's word on a neighbour to the hop: through the mpirun world, or by TCP.

Invariant: nothing is opened before the transfer asks for it, and the thread that asks is the one that joined the world.
"""

from __future__ import annotations

from typing import Protocol

from laminar.protocol.messages import HopOrder
from laminar.workers.relay.hop import Hop, HopError, Place
from laminar.workers.relay.receiver import OpenHop
from laminar.workers.relay.tcp_door import TcpDoor
from laminar.workers.relay.tcp_hop import TcpHop


class World(Protocol):
    """What is needed of `MpiWorld`."""

    rank: int
    size: int
    library: str
    name: str

    def hop(self, rank: int, epoch: int, peer: str, place: Place) -> Hop:
        """Either end of a hop to a rank of this world."""
        ...

    def settle(self) -> bool:
        """Bring what closed hops left behind to its end, without waiting; true if nothing is left."""
        ...


class HopOpener:
    """Knows the ways to this process's neighbours."""

    def __init__(self, hop_key: bytes, door: TcpDoor | None) -> None:
        """`door`: where upstream neighbours dial in; None where there never is one (the trainer)."""
        self.world: World | None = None  # None outside of one, and before it is joined
        self._hop_key = hop_key
        self._door = door

    def upstream(self, order: HopOrder | None) -> OpenHop | None:
        """How to open the downstream end of a hop; the function raises HopError."""
        if order is None:
            return None

        def open_hop(place: Place) -> Hop:
            if order.world_rank >= 0:
                return self._in_world(order, place)
            if self._door is None:
                raise HopError(f"{order.peer}: this process takes no TCP hops")
            return self._door.hop(order.epoch, order.peer, place)

        return open_hop

    def downstream(self, order: HopOrder | None) -> OpenHop | None:
        """How to open the upstream end of a hop; the function raises HopError."""
        if order is None:
            return None

        def open_hop(place: Place) -> Hop:
            if order.world_rank >= 0:
                return self._in_world(order, place)
            return TcpHop.dial(order.address, order.epoch, self._hop_key, order.peer, place)

        return open_hop

    def _in_world(self, order: HopOrder, place: Place) -> Hop:
        if self.world is None:
            raise HopError(f"{order.peer}: this process is in no mpirun world")
        return self.world.hop(order.world_rank, order.epoch, order.peer, place)

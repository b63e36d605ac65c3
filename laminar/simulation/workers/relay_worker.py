"""A modelled relay: attaches its store, says what it holds, and carries versions.

Invariant: what its store holds is there before it joins and after it has died.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from laminar.controller.relay import store_name
from laminar.protocol import messages
from laminar.simulation.channels.network import SimulatedNetwork
from laminar.simulation.workers.carrier import ModelledCarrier
from laminar.simulation.workers.modelled_worker import Life, ModelledWorker
from laminar.simulation.workers.weight_stores import WeightStores, WeightTimes

DOOR_PORT = 7000


class ModelledRelay(ModelledWorker):
    """Obeys `Carry`."""

    kind = "relay"

    def __init__(
        self,
        network: SimulatedNetwork,
        life: Life,
        *,
        times: WeightTimes,
        stores: WeightStores,
        carriers: MutableMapping[str, ModelledCarrier],
        keep_versions: int,
        world: str = "",
    ) -> None:
        """
        Args:
            carriers: the newest of each worker, by name; this one's enters itself.
            world: the mpirun world that it belongs to; empty: none.
        """
        self.store = store_name(life.index)
        self._stores = stores
        self.world = world
        super().__init__(network, life)
        self.carrier = ModelledCarrier(
            self, store=self.store, times=times, stores=stores, carriers=carriers, keep_versions=keep_versions
        )

    def before_ready(self) -> None:
        """See `ModelledWorker`."""
        self.send(
            messages.RelayJoined(
                versions=tuple(self._stores.held(self.store)),
                address=f"{self.life.host}:{DOOR_PORT + self.life.index}",
                world=self.world,
                world_rank=self.life.index if self.world else -1,
                library="modelled" if self.world else "",
            )
        )

    def handle(self, message: Any) -> None:
        """See `ModelledWorker`."""
        if isinstance(message, messages.Carry):
            self.carrier.obey(message)
        elif not isinstance(message, messages.BroadcastEnded):  # memory that is zeroed in time costs no time here
            super().handle(message)

    def freeze(self) -> None:
        """See `ModelledWorker`."""
        self.carrier.freeze()

    def thaw(self) -> None:
        """See `ModelledWorker`."""
        self.carrier.thaw()

    def ended(self) -> None:
        """See `ModelledWorker`."""
        self.carrier.ended()

"""A modelled relay: a store of versions, and the times at which a broadcast reaches the relays of the chain.

Invariant: it says that it holds a version only once it does, and only if all relays before it in the chain lived until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laminar.controller.relay_manager import store_name
from laminar.protocol import messages
from laminar.simulation.channels.network import SimulatedNetwork
from laminar.simulation.models.relay_model import Chain
from laminar.simulation.workers.modelled_worker import Life, ModelledWorker


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightTimes:
    """Seconds of moving weights from the master relay to the rollouts."""

    nbytes: int  # of a version
    latency_s: float  # of the chain, per chunk and hop
    bandwidth: float  # of the chain, bytes/s; infinite where the GPUs get their weights without relays
    pull_s: float  # from a relay's memory into the GPUs of one rollout

    def arrival_s(self, position: int, relays: int, chunk_bytes: int) -> float:
        """From the start of a broadcast until the relay at this position of the chain has all of it."""
        chain = Chain(nbytes=self.nbytes, relays=relays, latency_s=self.latency_s, bandwidth=self.bandwidth)
        return chain.arrival_seconds(position, -(-self.nbytes // chunk_bytes))


class WeightStores:
    """The relays' stores in shared memory, by name; each is there as long as its relay lives."""

    def __init__(self) -> None:
        self._versions: dict[str, list[int]] = {}  # ascending

    def create(self, name: str) -> None:
        """An empty store."""
        self._versions[name] = []

    def remove(self, name: str) -> None:
        """Its relay is gone."""
        self._versions.pop(name, None)

    def put(self, name: str, version: int, keep: int) -> None:
        """Commit a version; the oldest beyond `keep` go. Nothing is kept where no relay is."""
        held = self._versions.get(name)
        if held is not None:
            self._versions[name] = sorted({*held, version})[-keep:]

    def held(self, name: str) -> list[int]:
        """Versions in a store, ascending; none if there is no such store."""
        return self._versions.get(name, [])


class ModelledRelay(ModelledWorker):
    """Answers `Broadcast`; `chain` are all relays of the run that live, by rank."""

    kind = "relay"

    def __init__(
        self,
        network: SimulatedNetwork,
        life: Life,
        *,
        times: WeightTimes,
        stores: WeightStores,
        relays: Mapping[int, ModelledRelay],
        keep_versions: int,
    ) -> None:
        """`relays`: the newest process of each rank; the caller keeps it up to date."""
        self.store = store_name(life.index)
        self._times = times
        self._stores = stores
        self._relays = relays
        self._keep = keep_versions
        stores.create(self.store)
        super().__init__(network, life)

    def handle(self, message: Any) -> None:
        """See `ModelledWorker`."""
        if not isinstance(message, messages.Broadcast):
            super().handle(message)
            return
        position = message.chain.index(self.life.index)
        first = store_name(message.chain[0])
        if message.policy_version not in self._stores.held(first):
            self._failed(message, f"{first} does not hold it")
            return
        if position == 0:
            self._stored(message, 0.0)
            return
        upstream = [self._relays[rank] for rank in message.chain[:position]]
        seconds = self._times.arrival_s(position, len(message.chain), message.chunk_bytes)
        if seconds > message.deadline_s:
            self.after(message.deadline_s, self._failed, message, "the deadline has passed")
        else:
            self.after(seconds, self._arrived, message, upstream, seconds)

    def _arrived(self, message: messages.Broadcast, upstream: list[ModelledRelay], seconds: float) -> None:
        broken = next((relay for relay in upstream if not relay.alive or relay.hung), None)
        if broken is None:
            self._stores.put(self.store, message.policy_version, self._keep)
            self._stored(message, seconds)
        else:
            self._failed(message, f"{broken.name} is gone")

    def _stored(self, message: messages.Broadcast, seconds: float) -> None:
        nbytes = self._times.nbytes
        chunks = -(-nbytes // message.chunk_bytes)
        self.send(
            messages.WeightsStored(policy_version=message.policy_version, seconds=seconds, nbytes=nbytes, chunks=chunks)
        )

    def _failed(self, message: messages.Broadcast, error: str) -> None:
        self.send(messages.BroadcastFailed(policy_version=message.policy_version, error=error))

    def ended(self) -> None:
        """See `ModelledWorker`."""
        self._stores.remove(self.store)

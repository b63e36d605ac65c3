"""Seconds that weights take from the trainer to the rollouts: by the relays' chain, or by a global GPU broadcast.

Invariant: the same constants for both ways, so that they can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laminar.controller.chunk_size import best_chunks
from laminar.simulation.models.hardware import CONSTANTS, Constants, GpuSpec
from laminar.simulation.models.language_models import ModelSpec


@dataclass(kw_only=True, slots=True, frozen=True)
class Chain:
    """A pipelined broadcast down a chain of relays (the paper, appendix D)."""

    nbytes: int
    relays: int  # p, the master included
    latency_s: float  # alpha, per chunk and hop
    bandwidth: float  # 1 / beta, bytes/s

    @property
    def best_chunks(self) -> int:
        """Chunks k that minimise the time: sqrt(beta m (p - 2) / alpha)."""
        if self.relays <= 2:
            return 1  # a single hop has nothing to overlap with
        ideal = best_chunks(self.nbytes, self.relays, self.latency_s, self.bandwidth)
        below = max(1, math.floor(ideal))
        return min((below, below + 1), key=lambda chunks: self.arrival_seconds(self.relays - 1, chunks))

    def arrival_seconds(self, position: int, chunks: int | None = None) -> float:
        """When the relay at this position of the chain (0: the master) has all chunks: (position - 1 + k)(alpha + beta m / k)."""
        if position == 0:
            return 0.0
        k = self.best_chunks if chunks is None else chunks
        return (position - 1 + k) * (self.latency_s + self.nbytes / self.bandwidth / k)

    @property
    def seconds(self) -> float:
        """Until the last relay has all: (p - 2 + k)(alpha + beta m / k)."""
        return self.arrival_seconds(self.relays - 1)


def relay_chain(model: ModelSpec, relays: int, constants: Constants = CONSTANTS) -> Chain:
    """The chain that carries a model's weights to `relays` relays, the master included."""
    return Chain(
        nbytes=model.weight_bytes,
        relays=relays,
        latency_s=constants.relay_latency_s,
        bandwidth=constants.relay_nics * constants.nic_bandwidth * constants.network_share,
    )


def pull_seconds(model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, constants: Constants = CONSTANTS) -> float:
    """A rollout loads its relay's weights: every GPU its own shard over its own PCIe link, all at once."""
    return model.weight_bytes / tensor_parallel / (gpu.host_link_bandwidth * constants.host_link_share)


def global_sync_seconds(model: ModelSpec, gpu: GpuSpec, trainer_gpus: int, constants: Constants = CONSTANTS) -> float:
    """GPU-direct synchronization of all rollouts at once, as the schedules other than `laminar` need it.

    Trainer rank 0 gathers tensor by tensor and broadcasts each by NCCL to every rollout GPU, which keeps its slice. Gather and
    broadcast overlap; the broadcast leaves by the one NIC of rank 0's GPU and is the slower one. A ring or tree takes the same
    time to any number of receivers but for its latency, which is left out.
    """
    line = constants.nic_bandwidth * constants.network_share
    hosts = -(-trainer_gpus // constants.gpus_per_host)
    gather = model.weight_bytes * (hosts - 1) / hosts / (constants.nics_per_host * line)
    broadcast = model.weight_bytes / line
    reshard = model.weight_bytes / (gpu.memory_bandwidth * constants.decode_bandwidth_share)
    return max(gather, broadcast) + reshard

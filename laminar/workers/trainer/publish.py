"""Publish: the current weights into the master relay's store, tensor by tensor.

Invariant: never a second full model in memory. A sharded tensor is gathered by all ranks, written by rank 0, and freed
before the next one (from a GPU: before the one after). Training stands still for just this copy; all that follows is the
relays' work. The weights are laid out for the largest tensor parallel degree among the rollouts.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore
from laminar.weights.tensors import layout_of, write_tensors
from laminar.weights.version_file import VersionWriter
from laminar.workers.trainer.actor import Actor
from laminar.workers.trainer.lora import gathered_weights, published_weights
from laminar.workers.trainer.staging import CudaLane, Staging
from laminar.workers.trainer.tensor_parallel_plan import column_shards


@dataclass(kw_only=True, slots=True, frozen=True)
class Published:
    """What a publish took."""

    seconds: float  # for which training stood still
    nbytes: int


class Publisher:
    """Writes versions of an actor's weights; only rank 0 has the store."""

    def __init__(self, actor: Actor, store: WeightStore | None, *, keep: int | None = None) -> None:
        """Plan the layout.

        Args:
            actor: whose weights.
            store: where to; None on other ranks than 0.
            keep: versions to keep in the store, and at most as many bytes as `relay.keep_mib` says; None keeps them all.
        """
        self._model = actor.model
        weights = published_weights(actor.model)
        self._store = store
        keep_mib = actor.config.relay.keep_mib
        self._keep, self._keep_bytes = keep, None if keep_mib is None else keep_mib << 20
        self._staging = Staging(CudaLane()) if store is not None and actor.ranks.device.type == "cuda" else None
        self.layout: WeightLayout = layout_of(
            {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in weights.items()},
            actor.published_dtype,
            column_shards(actor.model, weights, actor.config.rollout.largest_degree),
        )

    def prepare(self) -> None:
        """Let old versions go and have memory ready for the next publish; off the critical path, from any thread.

        The relay on this host lets old versions go too, but it may have died.
        """
        if self._store is not None:
            if self._keep is not None:
                self._store.retain(self._keep, self._keep_bytes)
            self._store.prepare(self.layout)

    def publish(self, policy_version: int) -> Published:
        """Write and commit a version. A collective call.

        Raises:
            UserError: the shared memory is too small.
        """
        started = time.perf_counter()
        if self._store is None or policy_version in self._store.versions():  # these very weights, published before
            deque(gathered_weights(self._model), maxlen=0)  # holds none of them
        else:
            with self._store.begin(policy_version, self.layout) as writer:
                self._write(writer)
                writer.commit()
        return Published(seconds=time.perf_counter() - started, nbytes=self.layout.total_bytes)

    def _write(self, writer: VersionWriter) -> None:
        if self._staging is None:
            write_tensors(writer, gathered_weights(self._model))
            return
        try:
            write_tensors(writer, gathered_weights(self._model), self._staging.copy)
            self._staging.finish()
        finally:
            self._staging.abandon()

"""Publish: the current weights into the master relay's store, tensor by tensor.

Invariant: never a second full model in memory. A sharded tensor is gathered by all ranks, written by rank 0, and freed
before the next one. Training stands still for just this copy; all that follows is the relays' work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore
from laminar.weights.tensors import layout_of, write_tensors
from laminar.workers.trainer.actor import Actor
from laminar.workers.trainer.model_loading import named_weights
from laminar.workers.trainer.parallel import full_tensor


@dataclass(kw_only=True, slots=True, frozen=True)
class Published:
    """What a publish took."""

    seconds: float  # for which training stood still
    nbytes: int


class Publisher:
    """Writes versions of an actor's weights; only rank 0 has the store."""

    def __init__(self, actor: Actor, store: WeightStore | None) -> None:
        self._weights = named_weights(actor.model)
        self._store = store
        self.layout: WeightLayout = layout_of(
            {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                for name, tensor in self._weights.items()
            },
            actor.published_dtype,
        )

    def prepare(self) -> None:
        """Have memory ready for the next publish; off the critical path, from any thread."""
        if self._store is not None:
            self._store.prepare(self.layout)

    def publish(self, policy_version: int) -> Published:
        """Write and commit a version. A collective call.

        Raises:
            UserError: the shared memory is too small.
            FileExistsError: the version is there already.
        """
        started = time.perf_counter()
        if self._store is None:
            for _ in self._gathered():
                pass
        else:
            with self._store.begin(policy_version, self.layout) as writer:
                write_tensors(writer, self._gathered())
                writer.commit()
        return Published(seconds=time.perf_counter() - started, nbytes=self.layout.total_bytes)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights.items():
            yield name, full_tensor(tensor)

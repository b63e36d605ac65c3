"""Keys and values of one slot of the torch engine's cache, out to a file of KV and back in.

Invariant: what is read back is bit for bit what was written, layer by layer, positions 0 to n - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from laminar.workers.rollout.causal_model import CausalModel
from laminar.workers.rollout.kv_file import KvReader, KvWriter, shard_path
from laminar.workers.rollout.slot_cache import SlotCache


class SlotTransfer:
    """Writes and reads slots; runs in the engine's thread."""

    def __init__(self, model: CausalModel, cache: SlotCache) -> None:
        self._cache = cache
        self._token_bytes = model.kv_bytes_per_token
        shapes = sorted(set(model.kv_shapes))
        # (heads, key width, value width) per layer; a layer's keys come before its values, positions second
        self.layout = f"torch {len(model.kv_shapes)} layers of {shapes} {model.dtype}"

    def write(self, slot: int, token_ids: NDArray[np.int32], policy_version: int, path: Path) -> int:
        """Export the slot's first n positions, whose tokens are int32 [n]; returns the bytes of the file.

        Raises:
            OSError: the shared memory is too small.
        """
        writer = KvWriter(
            shard_path(path, 0),
            layout=self.layout,
            policy_version=policy_version,
            token_ids=token_ids,
            nbytes=self._token_bytes * len(token_ids),
        )
        with writer:
            tokens = len(token_ids)
            for held, stored in zip(self._tensors(slot, tokens), self._pieces(writer.buffer, tokens), strict=True):
                stored.copy_(held)
            writer.commit()
            return writer.file_bytes

    def read(self, slot: int, context: NDArray[np.int32], policy_version: int, path: Path) -> int:
        """Fill the slot with all but the last position of this context (int32 [n + 1]); returns the bytes of the file.

        Raises:
            KvRefused: the file is not there, or not of this context, version and model.
        """
        tokens = len(context) - 1
        with KvReader(shard_path(path, 0)) as reader:
            reader.check(layout=self.layout, policy_version=policy_version, context=context, least=tokens)
            payload, held = reader.payload(), len(reader.token_ids)
            for kept, stored in zip(self._tensors(slot, tokens), self._pieces(payload, held), strict=True):
                kept.copy_(stored[:, :tokens])
            return reader.file_bytes

    def _tensors(self, slot: int, tokens: int) -> Iterator[torch.Tensor]:
        """Keys, values of each layer: [heads, tokens, width], views of the cache."""
        for layer in self._cache.layers:
            yield layer.keys[slot, :, :tokens]
            yield layer.values[slot, :, :tokens]

    def _pieces(self, memory: NDArray[np.uint8], tokens: int) -> Iterator[torch.Tensor]:
        """The same, as they lie in the file."""
        start = 0
        flat = torch.frombuffer(memory, dtype=torch.uint8) if tokens else torch.empty(0, dtype=torch.uint8)
        for held in self._tensors(0, 1):
            heads, _, width = held.shape
            nbytes = heads * tokens * width * held.dtype.itemsize
            yield flat[start : start + nbytes].view(held.dtype).view(heads, tokens, width)
            start += nbytes

"""The KV cache of the torch engine: one slot per running trajectory, filled from position 0.

Invariants: slots 0 to n - 1 are in use, without gaps. In a used slot position p of `keys` and `values` holds token p of
prompt and response for every p below the slot's length, and `mask` is 0 exactly there; what lies behind it (left by an
earlier trajectory, or by padding) is masked out and overwritten as the trajectory grows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "laminar_slots"  # the attn_implementation that models are loaded with

# Arguments that change what attention computes and that `slot_attention` does not know.
_UNKNOWN_VARIANTS = ("softcap", "s_aux", "position_bias")


class SlotCache(Cache):
    """Keys and values of all layers. Handed to a Hugging Face model as its `past_key_values`."""

    def __init__(
        self,
        kv_shapes: list[tuple[int, int, int]],
        slots: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the cache.

        Args:
            kv_shapes: (heads, key width, value width) per layer.
            slots: trajectories at most.
            positions: tokens per slot at most.
            dtype: of keys, values and mask.
            device: where the model is.
        """
        self.window = _Window()
        super().__init__(
            layers=[_SlotLayer(shape, slots, positions, dtype, device, self.window) for shape in kv_shapes]
        )
        self.mask = torch.full((slots, 1, 1, positions), float("-inf"), dtype=dtype, device=device)

    def prefill(
        self,
        slots: NDArray[np.int64],
        sources: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Make the next forward pass fill slots from position 0.

        Args:
            slots: int64 [n], the slots to fill.
            sources: int64 [n], the row of the pass's input that each is filled from.
            lengths: int64 [n], tokens of each; the rest of the row is padding.
        """
        device = self.mask.device
        self.window.prefill, self.window.extended = True, None
        self.window.slots = torch.from_numpy(slots).to(device)
        self.window.sources = torch.from_numpy(sources).to(device)
        past_end = torch.arange(self.mask.shape[-1], device=device) >= torch.from_numpy(lengths).to(device)[:, None]
        rows = torch.zeros(past_end.shape, dtype=self.mask.dtype, device=device).masked_fill_(past_end, float("-inf"))
        self.mask[self.window.slots] = rows[:, None, None]

    def decode(self, lengths: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the next forward pass append one token to each of the first n slots.

        Args:
            lengths: int64 [n], tokens in each slot before the pass.

        Returns:
            the new tokens' positions (int64 [n, 1]) and the attention mask (additive, [n, 1, 1, longest + 1]).
        """
        device = self.mask.device
        window = self.window
        window.prefill, window.extended = False, None
        window.longest = int(lengths.max()) + 1
        window.slots = torch.arange(len(lengths), device=device)
        window.positions = torch.from_numpy(lengths).to(device)
        self.mask[window.slots, 0, 0, window.positions] = 0.0
        return window.positions[:, None], self.mask[: len(lengths), :, :, : window.longest]

    def extend(self, slot: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the next forward pass append `count` tokens to one slot, which holds `start`.

        Returns:
            their positions (int64 [1, count]) and the attention mask (additive, [1, 1, count, start + count]).
        """
        device = self.mask.device
        self.window.prefill, self.window.extended = False, (slot, start)
        self.fill(slot, start + count)
        mask = torch.full((count, start + count), float("-inf"), dtype=self.mask.dtype, device=device).triu(start + 1)
        return torch.arange(start, start + count, device=device)[None], mask[None, None]

    def fill(self, slot: int, length: int) -> None:
        """The slot's first `length` positions have been written from elsewhere."""
        self.mask[slot] = float("-inf")
        self.mask[slot, :, :, :length] = 0.0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a slot's first `length` positions and its mask to another slot."""
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]
        self.mask[target] = self.mask[source]

    def swap(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Exchange the first positions of two slots, and their masks."""
        for layer in self.layers:
            for stored in (layer.keys, layer.values):
                kept = stored[first, :, :first_length].clone()
                stored[first, :, :second_length] = stored[second, :, :second_length]
                stored[second, :, :first_length] = kept
        self.mask[[first, second]] = self.mask[[second, first]]


class _Window:
    """Which part of the cache the current forward pass works on; shared by all layers."""

    __slots__ = ("extended", "longest", "positions", "prefill", "slots", "sources")

    prefill: bool
    extended: tuple[int, int] | None  # the one slot, and the tokens that it holds; else all slots, one token each
    slots: torch.Tensor  # int64 [n]
    sources: torch.Tensor  # int64 [n], prefill only
    positions: torch.Tensor  # int64 [n], decode only
    longest: int  # decode only


class _SlotLayer(CacheLayerMixin):
    """One layer's keys [slots, heads, positions, key width] and values [slots, heads, positions, value width]."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        slots: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
        window: _Window,
    ) -> None:
        super().__init__()
        heads, key_width, value_width = shape
        # Zeros, not empty: a NaN left in memory would pass through the mask (0 * NaN). Pages are taken when written.
        self.keys = torch.zeros((slots, heads, positions, key_width), dtype=dtype, device=device)
        self.values = torch.zeros((slots, heads, positions, value_width), dtype=dtype, device=device)
        self.window = window
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: allocated at once."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values ([n, heads, new tokens, width]); returns those to attend to."""
        window = self.window
        if window.prefill:
            length = key_states.shape[2]
            self.keys[window.slots, :, :length] = key_states[window.sources]
            self.values[window.slots, :, :length] = value_states[window.sources]
            return key_states, value_states
        if window.extended is not None:
            slot, start = window.extended
            end = start + key_states.shape[2]
            self.keys[slot, :, start:end] = key_states[0]
            self.values[slot, :, start:end] = value_states[0]
            return self.keys[slot : slot + 1, :, :end], self.values[slot : slot + 1, :, :end]
        rows = len(window.slots)
        self.keys[window.slots, :, window.positions] = key_states[:, :, 0]
        self.values[window.slots, :, window.positions] = value_states[:, :, 0]
        return self.keys[:rows, :, : window.longest], self.values[:rows, :, : window.longest]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset) of a prefill: the pass attends to its own input only."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Always 0: positions are given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Tokens per slot."""
        return self.keys.shape[2]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a prefill (no mask: causal), of several tokens behind others, or of a decode step (one query position);
    the latter two with an additive mask.

    A decode step treats the query heads that share a key head as that many query positions, so keys and values are
    read in place, never repeated.

    Args:
        module: the model's attention module.
        query: [n, query heads, q, key width].
        key: [n, heads, k, key width].
        value: [n, heads, k, value width].
        attention_mask: None or [n, 1, q, k].
        scaling: factor on the scores.
        kwargs: what else the model passes on.

    Returns:
        [n, q, query heads, value width] and None (no attention weights).

    Raises:
        NotImplementedError: the model uses a kind of attention that this engine does not compute.
    """
    for name in _UNKNOWN_VARIANTS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    rows, query_heads, tokens, _ = query.shape
    if attention_mask is None or tokens > 1:
        shared, causal = key.shape[1] != query_heads, attention_mask is None and tokens > 1
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling, enable_gqa=shared
        )
        return output.transpose(1, 2).contiguous(), None
    heads = key.shape[1]
    grouped = query.reshape(rows, heads, query_heads // heads, query.shape[-1])
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, query_heads, value.shape[-1]), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)

"""A Hugging Face causal language model as the torch engine uses it.

Invariant: what passed the checks at start is computed exactly. A model whose attention or state this engine does not
handle (sliding windows shorter than the context, recurrent layers, soft caps) is refused, never approximated.
"""

from __future__ import annotations

import inspect
import threading

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from laminar.errors import UserError
from laminar.weights.tensors import read_tensors
from laminar.workers.rollout.model_manifest import check_manifest, model_manifest
from laminar.workers.rollout.slot_cache import ATTENTION, SlotCache

_LOADING = threading.Lock()  # from_pretrained sets process-wide defaults while it builds a model

_NEEDED_ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "logits_to_keep",
)


class CausalModel:
    """Forward passes over a `SlotCache`, and weights in place."""

    def __init__(self, model_path: str, dtype: str, context_tokens: int) -> None:
        """Load the model and try it.

        Args:
            model_path: a Hugging Face model folder.
            dtype: "float32" or "bfloat16".
            context_tokens: tokens of prompt and response at most.

        Raises:
            UserError: no such model, or one that this engine cannot run exactly.
        """
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype: torch.dtype = getattr(torch, dtype)
        try:
            with _LOADING:
                self._model = AutoModelForCausalLM.from_pretrained(
                    model_path,
                    dtype=self.dtype,
                    attn_implementation=ATTENTION,
                    local_files_only=True,
                )
        except (OSError, ValueError) as error:
            raise UserError(f"model {model_path!r}: the torch engine cannot load it: {error}") from error
        self._model.eval().requires_grad_(False).to(self.device)
        self.vocabulary: int = self._model.get_input_embeddings().num_embeddings
        accepted = inspect.signature(self._model.forward).parameters
        missing = [name for name in _NEEDED_ARGUMENTS if name not in accepted]
        if missing:
            raise UserError(
                f"model {model_path!r}: the torch engine cannot run {type(self._model).__name__}, which takes no "
                f"{', '.join(missing)}; use rollout.engine: vllm"
            )
        try:
            # (heads, key width, value width) of each layer
            self.kv_shapes = self._try(context_tokens)
        except NotImplementedError as error:
            raise UserError(
                f"model {model_path!r}: the torch engine cannot run {type(self._model).__name__}: {error}; "
                "use rollout.engine: vllm"
            ) from error
        elements = sum(heads * (key_width + value_width) for heads, key_width, value_width in self.kv_shapes)
        self.kv_bytes_per_token = elements * self.dtype.itemsize

    @torch.inference_mode()
    def _try(self, context_tokens: int) -> list[tuple[int, int, int]]:
        """Run two tokens, one after the other, through the model's own cache and through ours, and compare.

        Returns what a layer stores per token; raises NotImplementedError if the model is not for this engine.
        """
        cache = DynamicCache(config=self._model.config)
        for layer in cache.layers:
            window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else context_tokens
            if window < context_tokens or type(layer) not in (
                DynamicLayer,
                DynamicSlidingWindowLayer,
            ):
                raise NotImplementedError(f"a layer that keeps {type(layer).__name__} over {context_tokens} tokens")
        tokens = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        expected = self._model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[0]
        shapes = []
        for layer in cache.layers:
            if not layer.is_initialized:
                raise NotImplementedError("a layer that does not use the KV cache")
            shapes.append((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
        slots = SlotCache(shapes, 1, 2, self.dtype, self.device)
        zero = np.zeros(1, np.int64)
        slots.prefill(zero, zero, zero + 1)
        first = self.prefill(zero[:, None], zero, slots)[0]
        positions, mask = slots.decode(zero + 1)
        second = self.decode(zero, positions, mask, slots)
        tolerance = 1e-3 if self.dtype == torch.float32 else 5e-2
        error = (torch.cat([first, second]) - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
        if not error < tolerance:
            raise NotImplementedError(f"its logits differ by {float(error):.2g} (relative) when it runs step by step")
        return shapes

    def prefill(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache: SlotCache) -> torch.Tensor:
        """Logits [n, m, vocabulary] at m positions (int64 [m]) of contexts int64 [n, longest], padded on the right."""
        output = self._model(
            input_ids=torch.from_numpy(tokens).to(self.device),
            position_ids=torch.arange(tokens.shape[1], device=self.device)[None].expand(len(tokens), -1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.from_numpy(positions).to(self.device),
        )
        logits: torch.Tensor = output.logits
        return logits

    def decode(
        self,
        last: NDArray[np.int64],
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: SlotCache,
    ) -> torch.Tensor:
        """Logits [n, vocabulary] after one more token each (int64 [n]); positions and mask are from the cache."""
        output = self._model(
            input_ids=torch.from_numpy(last).to(self.device)[:, None],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits
        return logits[:, -1]

    def extend(
        self, tokens: NDArray[np.int64], positions: torch.Tensor, mask: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        """Logits [1, vocabulary] behind more tokens (int64 [q]) of one slot; positions and mask are from the cache."""
        output = self._model(
            input_ids=torch.from_numpy(tokens).to(self.device)[None],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits
        return logits[:, -1]

    @torch.no_grad()
    def load_weights(self, path: str) -> None:
        """Copy a version file's tensors into the model.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is not a weight file, or not this model's (names, shapes, dtypes); nothing was changed then.
        """
        check_manifest(path, model_manifest(self._model, self.dtype))
        parameters = self._model.state_dict()
        for name, tensor in read_tensors(path):
            parameters[name].copy_(tensor)

"""A causal language model as the trainer uses it: token ids in, logprobs and entropies of chosen tokens out.

Invariant: logits exist only for the chosen tokens. The model's own forward runs (with whatever it does after the head:
scaling, soft capping); a hook before the head drops every position that predicts none of them.

Rows are padded on the right and there is no attention mask: a causal model never looks from a real token at the padding
behind it, and without a mask attention takes its fastest and smallest path. Position ids are the model's default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from laminar.algorithms.logprobs import token_entropy, token_logprobs


class ScoringModel(nn.Module):
    """What is wrapped by DDP or sharded; `model` stays the plain Hugging Face model with its own names."""

    def __init__(self, model: PreTrainedModel, temperature: float, *, entropy_gradient: bool = False) -> None:
        """`temperature` is the one that tokens were sampled with; 0 (greedy) is scored as 1."""
        super().__init__()
        self.model = model
        self._temperature = temperature if temperature > 0 else 1.0
        self._entropy_gradient = entropy_gradient
        self._positions: torch.Tensor | None = None
        head: nn.Module | None = model.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(self._drop_positions)

    def forward(
        self,
        token_ids: torch.Tensor,  # int64 [B, L], padded on the right
        positions: torch.Tensor,  # int64 [N]: index into B * L of the position whose logits predict the token
        targets: torch.Tensor,  # int64 [N]
    ) -> tuple[torch.Tensor, torch.Tensor]:  # float32 [N], float32 [N]
        """(logprobs with gradient, entropies, with gradient if that was asked for) of the targets."""
        self._positions = positions
        try:
            logits = self.model(input_ids=token_ids, use_cache=False).logits
        finally:
            untouched = self._positions is not None
            self._positions = None
        rows = logits.flatten(0, 1)
        if untouched:  # a model whose head is no module of its own
            rows = rows[positions]
        # The outputs of a sharded module must be no views (fully_shard hooks its backward pass onto them).
        logprobs = token_logprobs(rows, targets, self._temperature).clone()
        entropies = token_entropy(rows if self._entropy_gradient else rows.detach(), self._temperature).clone()
        return logprobs, entropies

    def _drop_positions(self, head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the head: [B, L, H] -> [1, N, H]."""
        if self._positions is None:
            return None
        hidden = inputs[0].flatten(0, 1)[self._positions].unsqueeze(0)
        self._positions = None
        return (hidden, *inputs[1:])

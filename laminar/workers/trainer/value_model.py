"""The critic's network: the trunk of a causal language model with a value head.

Invariant: the values of a new head are exactly 0, so that the first advantages are the returns themselves. As in
`ScoringModel`, rows are padded on the right, without an attention mask.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """What is wrapped by DDP or sharded; `model` is the trunk with its Hugging Face names."""

    def __init__(self, language_model: PreTrainedModel) -> None:
        """Take the trunk over; the language model's own head is left behind."""
        super().__init__()
        trunk = language_model.base_model
        self.model: PreTrainedModel = trunk
        width = language_model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        token_ids: torch.Tensor,  # int64 [B, L], padded on the right
        positions: torch.Tensor,  # int64 [N]: index into B * L of the position before the token
    ) -> torch.Tensor:  # float32 [N]
        """The value before each of the tokens: what the trajectory is expected to earn from it on."""
        hidden = self.model(input_ids=token_ids, use_cache=False).last_hidden_state.flatten(0, 1)[positions]
        with torch.autocast(hidden.device.type, enabled=False):  # values are compared with returns: no bfloat16
            values: torch.Tensor = self.head(hidden.to(self.head.weight.dtype))[:, 0]
        return values.clone()  # no view: fully_shard hooks its backward pass onto it

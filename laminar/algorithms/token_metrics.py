"""Metrics that add up. Invariant: metrics of micro-batches, added, equal the metrics of their union, in any order.

Each field is a detached float64 tensor of shape []: a sum over loss tokens, or a maximum where its name ends in `_max`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenMetrics:
    """Base of all metrics over loss tokens."""

    tokens: torch.Tensor  # float64 []: loss tokens counted

    def __add__(self, other: Self) -> Self:
        """The metrics of both sets of tokens together."""
        return type(self)(
            **{
                name: torch.maximum(mine, theirs) if name.endswith("_max") else mine + theirs
                for (name, mine), theirs in zip(self._tensors().items(), other._tensors().values(), strict=True)
            }
        )

    def reduced(
        self,
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
        max_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    ) -> Self:
        """The metrics over all ranks: each callable gets one float64 vector and returns it reduced (a collective)."""
        tensors = self._tensors()
        sums = [name for name in tensors if not name.endswith("_max")]
        maxima = [name for name in tensors if name.endswith("_max")]
        reduced = dict(zip(sums, sum_over_ranks(torch.stack([tensors[name] for name in sums])), strict=True))
        if maxima:
            reduced |= zip(maxima, max_over_ranks(torch.stack([tensors[name] for name in maxima])), strict=True)
        return type(self)(**reduced)

    def _per_token(self, total: torch.Tensor) -> float:
        """`total` over the number of tokens; 0 when there are none."""
        return (total / self.tokens.clamp_min(1)).item()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Detached float64 sum of `values` where `mask` (bool, same shape) holds; what lies elsewhere may be NaN."""
    return torch.where(mask, values.detach(), 0).sum(dtype=torch.float64)


def masked_max(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Detached float64 maximum of non-negative `values` where `mask` holds; 0 when it holds nowhere."""
    chosen = torch.where(mask, values.detach(), 0).double()
    return chosen.max() if chosen.numel() else chosen.sum()

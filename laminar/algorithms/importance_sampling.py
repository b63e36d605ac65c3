"""Correction between the engine that sampled the tokens and the trainer that scores them (TIS).

Invariant: the weights lie in [0, cap] and carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laminar.algorithms.numerics import at_least_float32, check_shapes
from laminar.algorithms.token_metrics import TokenMetrics, masked_max, masked_sum


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImportanceWeightMetrics(TokenMetrics):
    """How far the correction went, as sums over loss tokens; add those of the micro-batches, then read properties."""

    capped: torch.Tensor  # float64 []: tokens whose weight is at the cap
    weight_sum: torch.Tensor  # float64 []
    weight_max: torch.Tensor  # float64 []

    @property
    def capped_fraction(self) -> float:
        """Share of loss tokens whose weight was cut to the cap."""
        return self._per_token(self.capped)

    @property
    def weight_mean(self) -> float:
        """Mean weight over loss tokens; 1 when engine and trainer agree, lower the more the cap cuts."""
        return self._per_token(self.weight_sum)


def truncated_importance_weights(
    trainer_logprobs: torch.Tensor,  # float [B, T] or [N]
    engine_logprobs: torch.Tensor,  # float, same shape: as the engine reported them when it sampled
    *,
    cap: float = 2.0,
) -> torch.Tensor:  # float32 (float64 if either is), same shape
    """Detached weight of every token: `min(exp(trainer - engine), cap)`.

    Both must be logprobs of the distribution that was sampled from (the temperature applied).

    Source: truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training", section on TIS.

    Raises ValueError for shapes that differ and for a cap that is not above 0.
    """
    check_shapes(trainer_logprobs=trainer_logprobs, engine_logprobs=engine_logprobs)
    if not cap > 0:
        raise ValueError(f"cap must be above 0; it is {cap}")
    with torch.no_grad():
        return (at_least_float32(trainer_logprobs) - at_least_float32(engine_logprobs)).exp().clamp(max=cap)


def importance_weight_metrics(
    weights: torch.Tensor,  # float [B, T] or [N]: from truncated_importance_weights
    loss_mask: torch.Tensor,  # bool or 0/1, same shape
    *,
    cap: float = 2.0,
) -> ImportanceWeightMetrics:
    """Metrics of `weights` over the tokens of `loss_mask`; `cap` is the one that they were cut to."""
    check_shapes(weights=weights, loss_mask=loss_mask)
    mask = loss_mask.bool()
    ones = torch.ones_like(weights)
    return ImportanceWeightMetrics(
        tokens=masked_sum(ones, mask),
        capped=masked_sum(ones, mask & (weights >= cap)),
        weight_sum=masked_sum(weights, mask),
        weight_max=masked_max(weights, mask),
    )

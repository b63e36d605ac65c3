"""The critic's loss. Invariant: as for policy losses, what a token weighs is decided elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laminar.algorithms.numerics import at_least_float32, check_shapes
from laminar.algorithms.token_metrics import TokenMetrics, masked_sum


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ValueMetrics(TokenMetrics):
    """How good the values are, as sums over loss tokens; add those of the micro-batches, then read the properties."""

    value_sum: torch.Tensor  # float64 []
    return_sum: torch.Tensor  # float64 []
    return_square_sum: torch.Tensor  # float64 []
    error_sum: torch.Tensor  # float64 []: of returns less values
    error_square_sum: torch.Tensor  # float64 []
    clipped: torch.Tensor  # float64 []

    @property
    def value_mean(self) -> float:
        """Mean value."""
        return self._per_token(self.value_sum)

    @property
    def clip_fraction(self) -> float:
        """Share of loss tokens whose value has moved as far as it may."""
        return self._per_token(self.clipped)

    @property
    def explained_variance(self) -> float:
        """1 - variance(returns - values) / variance(returns): 1 is perfect, 0 no better than a constant."""
        returns = self._per_token(self.return_square_sum) - self._per_token(self.return_sum) ** 2
        errors = self._per_token(self.error_square_sum) - self._per_token(self.error_sum) ** 2
        return 1.0 - errors / returns if returns > 1e-12 else 0.0


def value_loss(
    values: torch.Tensor,  # float [N], with gradient
    old_values: torch.Tensor,  # float [N]: of the critic at the start of the step
    returns: torch.Tensor,  # float [N]
    loss_mask: torch.Tensor,  # bool or 0/1 [N]
    *,
    clip: float | None = 0.2,
) -> tuple[torch.Tensor, ValueMetrics]:
    """Loss of each token, float [N], and metrics: `max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2`.

    Without `clip` it is the first of the two. 0 at masked tokens, whatever stands there.

    Source: PPO (arXiv 1707.06347) equation 9; the clip is that of its published code (Huang et al. 2022, "The 37
    implementation details of PPO", detail 9).

    Raises ValueError for shapes that differ.
    """
    check_shapes(values=values, old_values=old_values, returns=returns, loss_mask=loss_mask)
    mask = loss_mask.bool()
    values = torch.where(mask, at_least_float32(values), 0.0)
    old_values, returns = torch.where(mask, old_values.detach(), 0.0), torch.where(mask, returns.detach(), 0.0)
    errors = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        clipped = bounded > errors
        errors = torch.maximum(errors, bounded)
    difference = returns - values
    metrics = ValueMetrics(
        tokens=masked_sum(torch.ones_like(values), mask),
        value_sum=masked_sum(values, mask),
        return_sum=masked_sum(returns, mask),
        return_square_sum=masked_sum(returns.double().square(), mask),
        error_sum=masked_sum(difference, mask),
        error_square_sum=masked_sum(difference.double().square(), mask),
        clipped=masked_sum(torch.ones_like(values), mask & clipped),
    )
    return errors / 2, metrics

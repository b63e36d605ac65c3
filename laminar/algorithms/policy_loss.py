"""The clip-higher policy objective. Invariant: splitting a mini-batch into micro-batches never changes its gradient.

That holds because every micro-batch divides by the same `normalizer`, the loss tokens of the whole mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laminar.algorithms.numerics import LOG_RATIO_LIMIT, at_least_float32, check_normalizer, check_shapes
from laminar.algorithms.token_metrics import TokenMetrics, masked_max, masked_sum


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyLossMetrics(TokenMetrics):
    """What the clipping did, as sums over loss tokens; add those of the micro-batches, then read the properties."""

    clipped_low: torch.Tensor  # float64 []: tokens with a negative advantage and ratio < 1 - clip_low
    clipped_high: torch.Tensor  # float64 []: tokens with a positive advantage and ratio > 1 + clip_high
    ratio_sum: torch.Tensor  # float64 []
    ratio_max: torch.Tensor  # float64 []

    @property
    def clip_fraction_low(self) -> float:
        """Share of loss tokens without gradient because their probability has fallen far enough."""
        return self._per_token(self.clipped_low)

    @property
    def clip_fraction_high(self) -> float:
        """Share of loss tokens without gradient because their probability has risen far enough."""
        return self._per_token(self.clipped_high)

    @property
    def ratio_mean(self) -> float:
        """Mean of `exp(logprobs - old_logprobs)` over loss tokens; 1 when the policy has not moved."""
        return self._per_token(self.ratio_sum)


def policy_loss(
    logprobs: torch.Tensor,  # float [B, T] padded or [N] packed, with gradient
    old_logprobs: torch.Tensor,  # float, shape of logprobs: the policy that the ratio is taken against
    advantages: torch.Tensor,  # float, shape of logprobs, or [B] (one per trajectory) when padded
    loss_mask: torch.Tensor,  # bool or 0/1, shape of logprobs
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    importance_weights: torch.Tensor | None = None,  # float, shape of logprobs, without gradient
    normalizer: float,
) -> tuple[torch.Tensor, PolicyLossMetrics]:
    """Loss (shape []) of one micro-batch, to be minimised, and its metrics.

    `loss = -sum_t w_t * min(ratio_t * A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) * A_t) / normalizer`
    over the tokens of `loss_mask`; `w_t` are `importance_weights` (1 without them). Values at masked tokens are
    never looked at, NaN included. A micro-batch without loss tokens gives 0 with a zero gradient.

    `normalizer` is the number of loss tokens of the mini-batch over ALL its micro-batches and ranks, so that every
    token weighs the same whatever the length of its trajectory. Sum (do not average) the gradients: where the framework
    averages them over ranks, as DDP and FSDP do, multiply the loss by the number of ranks.

    Log-ratios are clamped to +-20, beyond which there is no gradient.

    Source: PPO clipping (arXiv 1707.06347, equation 7); clip-higher and token-level loss: DAPO (arXiv 2503.14476,
    sections 3.1 and 3.3).

    Raises ValueError for shapes that differ and for a normalizer that is not above 0.
    """
    if logprobs.dim() >= 2 and advantages.shape == logprobs.shape[:-1]:
        advantages = advantages.unsqueeze(-1).expand_as(logprobs)
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, loss_mask=loss_mask)
    check_normalizer(normalizer)

    mask = loss_mask.bool()
    log_ratio = torch.where(mask, at_least_float32(logprobs) - at_least_float32(old_logprobs.detach()), 0.0)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if importance_weights is not None:
        check_shapes(logprobs=logprobs, importance_weights=importance_weights)
        objective = objective * importance_weights.detach()
    loss = -torch.where(mask, objective, 0.0).sum() / normalizer

    ones = torch.ones_like(ratio)
    metrics = PolicyLossMetrics(
        tokens=masked_sum(ones, mask),
        clipped_low=masked_sum(ones, mask & (ratio < 1 - clip_low) & (advantages < 0)),
        clipped_high=masked_sum(ones, mask & (ratio > 1 + clip_high) & (advantages > 0)),
        ratio_sum=masked_sum(ratio, mask),
        ratio_max=masked_max(ratio, mask),
    )
    return loss, metrics

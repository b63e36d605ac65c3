"""Correction between the engine that sampled the tokens and the trainer that scores them: truncated (TIS) or masked (MIS).

Invariant: the weights lie in [0, cap] and carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from laminar.algorithms.numerics import at_least_float32, check_shapes, mean_per_trajectory, sum_per_trajectory
from laminar.algorithms.token_metrics import TokenMetrics, masked_max, masked_sum

Level = Literal["token", "trajectory", "geometric"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImportanceWeights:
    """Weights of N tokens."""

    weights: torch.Tensor  # float32 [N] (float64 if the logprobs are)
    cut: torch.Tensor  # bool [N]: cut to the cap, or left out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImportanceWeightMetrics(TokenMetrics):
    """How far the correction went, as sums over loss tokens; add those of the micro-batches, then read properties."""

    cut: torch.Tensor  # float64 []: tokens whose weight was cut to the cap, or that were left out
    weight_sum: torch.Tensor  # float64 []
    weight_max: torch.Tensor  # float64 []

    @property
    def cut_fraction(self) -> float:
        """Share of loss tokens whose weight was cut to the cap, or that were left out."""
        return self._per_token(self.cut)

    @property
    def weight_mean(self) -> float:
        """Mean weight over loss tokens; 1 when engine and trainer agree, lower the more is cut."""
        return self._per_token(self.weight_sum)


def truncated_weights(
    trainer_logprobs: torch.Tensor,  # float [N]
    engine_logprobs: torch.Tensor,  # float [N]: as the engine reported them when it sampled
    loss_mask: torch.Tensor,  # bool or 0/1 [N]
    trajectories: torch.Tensor,  # int64 [N]: the trajectory of each token, numbered from 0 (below N)
    *,
    level: Level = "token",
    cap: float = 2.0,
) -> ImportanceWeights:
    """`min(trainer / engine, cap)`: of each token, or of its trajectory by `level`.

    `token` is one token's ratio of probabilities; `trajectory` the product over the loss tokens of its trajectory;
    `geometric` that product's root, the ratio of a mean token. Both logprobs must be of the distribution that was sampled
    from (the temperature applied).

    Source: truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training", section on TIS; after Ionides 2008, "Truncated importance sampling".

    Raises ValueError for shapes that differ and for a cap that is not above 0.
    """
    ratio = _ratio(trainer_logprobs, engine_logprobs, loss_mask, trajectories, level, cap)
    return ImportanceWeights(weights=ratio.clamp(max=cap), cut=ratio > cap)


def masked_weights(
    trainer_logprobs: torch.Tensor,  # float [N]
    engine_logprobs: torch.Tensor,  # float [N]
    loss_mask: torch.Tensor,  # bool or 0/1 [N]
    trajectories: torch.Tensor,  # int64 [N]
    *,
    level: Level = "token",
    floor: float = 0.0,
    cap: float = 2.0,
) -> ImportanceWeights:
    """`trainer / engine` where that lies from `floor` to `cap`, else 0: such tokens (trajectories) are left out.

    Source: masked importance sampling, Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch" (trajectory level); IcePop, Ring-1T (arXiv 2510.18855) section 3 (token level, with a
    floor).

    Raises ValueError for shapes that differ and for a cap that is not above 0.
    """
    ratio = _ratio(trainer_logprobs, engine_logprobs, loss_mask, trajectories, level, cap)
    cut = (ratio > cap) | (ratio < floor)
    return ImportanceWeights(weights=torch.where(cut, 0.0, ratio), cut=cut)


def importance_weight_metrics(
    importance: ImportanceWeights,
    loss_mask: torch.Tensor,  # bool or 0/1 [N]
) -> ImportanceWeightMetrics:
    """Metrics over the tokens of `loss_mask`."""
    check_shapes(weights=importance.weights, loss_mask=loss_mask)
    mask = loss_mask.bool()
    ones = torch.ones_like(importance.weights)
    return ImportanceWeightMetrics(
        tokens=masked_sum(ones, mask),
        cut=masked_sum(ones, mask & importance.cut),
        weight_sum=masked_sum(importance.weights, mask),
        weight_max=masked_max(importance.weights, mask),
    )


@torch.no_grad()
def _ratio(
    trainer: torch.Tensor,
    engine: torch.Tensor,
    loss_mask: torch.Tensor,
    trajectories: torch.Tensor,
    level: Level,
    cap: float,
) -> torch.Tensor:
    check_shapes(trainer_logprobs=trainer, engine_logprobs=engine, loss_mask=loss_mask, trajectories=trajectories)
    if not cap > 0:
        raise ValueError(f"cap must be above 0; it is {cap}")
    mask = loss_mask.bool()
    difference = at_least_float32(trainer) - at_least_float32(engine)
    match level:
        case "token":
            return torch.where(mask, difference, 0.0).exp()
        case "trajectory":
            return sum_per_trajectory(difference, mask, trajectories).exp()
        case "geometric":
            return mean_per_trajectory(difference, mask, trajectories).exp()

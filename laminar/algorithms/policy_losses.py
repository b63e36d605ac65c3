"""Policy losses, token by token: pure functions of the same arguments, to be minimised.

Invariants: a loss looks at one trajectory at a time, and what a token weighs is decided elsewhere (`aggregation.py`); so
cutting a mini-batch into micro-batches never changes its gradient. What stands at masked tokens is never looked at, NaN
included. Log-ratios are clamped to +-20, beyond which there is no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laminar.algorithms.numerics import LOG_RATIO_LIMIT, at_least_float32, check_shapes, mean_per_trajectory
from laminar.algorithms.token_metrics import TokenMetrics, masked_max, masked_sum


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyTokens:
    """N response tokens of a few trajectories, those of one trajectory together."""

    logprobs: torch.Tensor  # float [N], with gradient: the policy that is trained
    old_logprobs: torch.Tensor  # float [N]: the policy that the ratio is taken against
    engine_logprobs: torch.Tensor  # float [N]: the policy that sampled the tokens, as its engine reported them
    advantages: torch.Tensor  # float [N]
    loss_mask: torch.Tensor  # bool [N]
    trajectories: torch.Tensor  # int64 [N]: the trajectory of each token, numbered from 0 (below N)

    def __post_init__(self) -> None:
        """Raise ValueError for shapes that differ: broadcasting would hide mistakes."""
        check_shapes(
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            engine_logprobs=self.engine_logprobs,
            advantages=self.advantages,
            loss_mask=self.loss_mask,
            trajectories=self.trajectories,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLosses:
    """What a policy loss gives for N tokens."""

    values: torch.Tensor  # float [N], with gradient; 0 at masked tokens
    ratio: torch.Tensor  # float [N], without gradient; 1 at masked tokens
    clipped_low: torch.Tensor  # bool [N]: without gradient, or bounded, because the ratio is low
    clipped_high: torch.Tensor  # bool [N]: because it is high


def ppo(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> TokenLosses:
    """`-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`, where A < 0 at most `-dual_clip * A`.

    Source: PPO (arXiv 1707.06347) equation 7; dual clip, Ye et al. 2019 (arXiv 1912.09729).
    """
    ratio = _log_ratio(tokens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _clipped(ratio, tokens, clip_low, clip_high, dual_clip)


def dapo(tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.28) -> TokenLosses:
    """`ppo` with room for unlikely tokens to rise (clip-higher); goes with aggregation `token`.

    Source: DAPO (arXiv 2503.14476) section 3.1.
    """
    return ppo(tokens, clip_low=clip_low, clip_high=clip_high)


def gspo(tokens: PolicyTokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLosses:
    """`ppo` with the ratio of the whole trajectory, its length taken out, `exp(mean of log-ratios)`, at each of its tokens.

    Goes with aggregation `trajectory`, under which the gradient is that of the paper's objective, also where the
    advantages of a trajectory's tokens differ.

    Source: GSPO (arXiv 2507.18071) section 4, in its form GSPO-token.
    """
    mask = tokens.loss_mask.bool()
    whole = mean_per_trajectory(_log_ratio(tokens).detach(), mask, tokens.trajectories)
    logprobs = torch.where(mask, at_least_float32(tokens.logprobs), 0.0)
    # Its value is that of the trajectory, its gradient that of the token.
    log_ratio = torch.where(mask, whole, 0.0) + logprobs - logprobs.detach()
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _clipped(ratio, tokens, clip_low, clip_high)


def cispo(tokens: PolicyTokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLosses:
    """`-w * A * logprob` with `w = clip(ratio, 1 - clip_low, 1 + clip_high)` without gradient: every token keeps one.

    Source: CISPO, MiniMax-M1 (arXiv 2506.13585) section 3.1, there without a lower bound (clip_low 1).
    """
    mask = tokens.loss_mask.bool()
    ratio = _log_ratio(tokens).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    logprobs = torch.where(mask, at_least_float32(tokens.logprobs), 0.0)
    return TokenLosses(
        values=-weights * _advantages(tokens) * logprobs,
        ratio=ratio,
        clipped_low=mask & (ratio < 1 - clip_low),
        clipped_high=mask & (ratio > 1 + clip_high),
    )


def decoupled_ppo(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, behavior_cap: float | None = None
) -> TokenLosses:
    """`ppo` around the proximal policy (`old_logprobs`), each token weighed by `proximal / behavior`.

    The behavior policy is the one that sampled (`engine_logprobs`). Tokens whose weight is above `behavior_cap` are left
    out; None leaves out none.

    Source: Hilton et al. 2021 (arXiv 2110.00641) section 3; AReaL (arXiv 2505.24298) section 5.2, the cap in its code.
    """
    losses = ppo(tokens, clip_low=clip_low, clip_high=clip_high)
    mask = tokens.loss_mask.bool()
    difference = at_least_float32(tokens.old_logprobs.detach()) - at_least_float32(tokens.engine_logprobs)
    weights = torch.where(mask, difference, 0.0).clamp(max=LOG_RATIO_LIMIT).exp()
    if behavior_cap is not None:
        weights = torch.where(weights > behavior_cap, 0.0, weights)
    return TokenLosses(
        values=losses.values * weights,
        ratio=losses.ratio,
        clipped_low=losses.clipped_low,
        clipped_high=losses.clipped_high,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyLossMetrics(TokenMetrics):
    """What the clipping did, as sums over loss tokens; add those of the micro-batches, then read the properties."""

    clipped_low: torch.Tensor  # float64 []
    clipped_high: torch.Tensor  # float64 []
    ratio_sum: torch.Tensor  # float64 []
    ratio_max: torch.Tensor  # float64 []

    @property
    def clip_fraction_low(self) -> float:
        """Share of loss tokens without gradient because their probability has fallen far enough."""
        return self._per_token(self.clipped_low)

    @property
    def clip_fraction_high(self) -> float:
        """Share of loss tokens without gradient (`cispo`: with a bounded one) because it has risen far enough."""
        return self._per_token(self.clipped_high)

    @property
    def ratio_mean(self) -> float:
        """Mean ratio over loss tokens; 1 when the policy has not moved."""
        return self._per_token(self.ratio_sum)


def policy_loss_metrics(losses: TokenLosses, loss_mask: torch.Tensor) -> PolicyLossMetrics:
    """Metrics of `losses` over the tokens of `loss_mask` (bool or 0/1 [N])."""
    mask = loss_mask.bool()
    ones = torch.ones_like(losses.ratio)
    return PolicyLossMetrics(
        tokens=masked_sum(ones, mask),
        clipped_low=masked_sum(ones, losses.clipped_low),
        clipped_high=masked_sum(ones, losses.clipped_high),
        ratio_sum=masked_sum(losses.ratio, mask),
        ratio_max=masked_max(losses.ratio, mask),
    )


def plain_ratio(tokens: PolicyTokens) -> torch.Tensor:  # float [N], without gradient
    """`logprobs` against `old_logprobs` token by token, for losses that do not tell their own ratio."""
    return _log_ratio(tokens).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _log_ratio(tokens: PolicyTokens) -> torch.Tensor:
    difference = at_least_float32(tokens.logprobs) - at_least_float32(tokens.old_logprobs.detach())
    return torch.where(tokens.loss_mask.bool(), difference, 0.0)


def _advantages(tokens: PolicyTokens) -> torch.Tensor:
    return torch.where(tokens.loss_mask.bool(), tokens.advantages.detach(), 0.0)


def _clipped(
    ratio: torch.Tensor, tokens: PolicyTokens, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLosses:
    """PPO's pessimistic bound for a ratio with gradient."""
    mask, advantages = tokens.loss_mask.bool(), _advantages(tokens)
    falls, rises = advantages < 0, advantages > 0
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped_low = mask & (ratio < 1 - clip_low) & falls
    clipped_high = mask & (ratio > 1 + clip_high) & rises
    if dual_clip is not None:
        objective = torch.where(falls, torch.maximum(objective, dual_clip * advantages), objective)
        clipped_high |= mask & (ratio > dual_clip) & falls
    return TokenLosses(values=-objective, ratio=ratio.detach(), clipped_low=clipped_low, clipped_high=clipped_high)

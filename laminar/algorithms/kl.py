"""KL divergences estimated on sampled tokens. Invariant: `k2` and `k3` are never negative, token by token.

With x sampled from q and d = log p(x) - log q(x), KL(q || p) is estimated by k1 = -d (unbiased, noisy), k2 = d^2 / 2
(biased, quiet) and k3 = exp(d) - 1 - d (unbiased, quieter than k1).
Source: Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from laminar.algorithms.numerics import LOG_RATIO_LIMIT, at_least_float32, check_shapes
from laminar.algorithms.token_metrics import TokenMetrics, masked_max, masked_sum

KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MismatchMetrics(TokenMetrics):
    """Engine against trainer, as sums over loss tokens; add those of the micro-batches, then read the properties."""

    k1_sum: torch.Tensor  # float64 []
    k3_sum: torch.Tensor  # float64 []
    difference_max: torch.Tensor  # float64 []: largest |engine - trainer| logprob of any token

    @property
    def mismatch_kl(self) -> float:
        """The reported figure: mean k3 estimate of KL(engine || trainer), nats per token, never negative."""
        return self._per_token(self.k3_sum)

    @property
    def mismatch_kl_k1(self) -> float:
        """Mean k1 estimate of the same; negative values are possible."""
        return self._per_token(self.k1_sum)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReferenceKLMetrics(TokenMetrics):
    """KL to the reference model, as sums over loss tokens; add those of the micro-batches."""

    kl_sum: torch.Tensor  # float64 []

    @property
    def reference_kl(self) -> float:
        """Mean estimate of KL(policy || reference), nats per token."""
        return self._per_token(self.kl_sum)


def mismatch_kl(
    engine_logprobs: torch.Tensor,  # float [B, T] or [N]: of the tokens that the engine sampled
    trainer_logprobs: torch.Tensor,  # float, same shape: the trainer's for the same weights and tokens
    loss_mask: torch.Tensor,  # bool or 0/1, same shape
) -> MismatchMetrics:
    """Sums that estimate KL(engine || trainer) over the tokens of `loss_mask`, without gradient.

    With the trainer's logprobs of the generating version it measures numerics alone; with those of a newer version it
    measures staleness too. In the k3 sum a log-ratio counts as at most 20 in size.

    Raises ValueError for shapes that differ.
    """
    check_shapes(engine_logprobs=engine_logprobs, trainer_logprobs=trainer_logprobs, loss_mask=loss_mask)
    mask = loss_mask.bool()
    # float64: k3 of two logprobs that differ by 1e-5 is 5e-11, the difference of numbers near 1e-5.
    difference = torch.where(mask, trainer_logprobs.detach().double() - engine_logprobs.detach().double(), 0.0)
    return MismatchMetrics(
        tokens=masked_sum(torch.ones_like(difference), mask),
        k1_sum=-masked_sum(difference, mask),
        k3_sum=masked_sum(_estimate(difference, "k3"), mask),
        difference_max=masked_max(difference.abs(), mask),
    )


def reference_kl(
    logprobs: torch.Tensor,  # float [N], with gradient where it is a term of the loss
    reference_logprobs: torch.Tensor,  # float [N], without gradient
    loss_mask: torch.Tensor,  # bool or 0/1 [N]
    *,
    estimator: KLEstimator = "k3",
) -> tuple[torch.Tensor, ReferenceKLMetrics]:
    """Estimate of KL(policy || reference) at each token, float [N], 0 at masked ones, and metrics.

    In the loss the gradient is that of the estimate itself, as in GRPO: per token `(1 - p_ref / p) * grad log p` for k3 and
    `(log p - log p_ref) * grad log p` for k2. Over tokens of the policy itself, k2's is in expectation the gradient of
    KL(policy || reference) and k3's that of KL(reference || policy); k1's is `grad log p`, zero in expectation whatever the
    reference: there it is a measure, not a penalty. In the reward it is k1 that is unbiased.
    Log-ratios are clamped to +-20, beyond which there is no gradient.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300) equation 4; in the reward, Ouyang et al. 2022 (arXiv 2203.02155)
    equation 2.

    Raises ValueError for shapes that differ and an unknown estimator.
    """
    check_shapes(logprobs=logprobs, reference_logprobs=reference_logprobs, loss_mask=loss_mask)
    mask = loss_mask.bool()
    difference = torch.where(mask, at_least_float32(reference_logprobs.detach()) - at_least_float32(logprobs), 0.0)
    per_token = _estimate(difference, estimator)
    metrics = ReferenceKLMetrics(
        tokens=masked_sum(torch.ones_like(per_token), mask),
        kl_sum=masked_sum(per_token, mask),
    )
    return per_token, metrics


def _estimate(difference: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Per-token estimate of KL(q || p) from `difference` = log p - log q of tokens sampled from q."""
    bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case "k1":
            return -bounded
        case "k2":
            return bounded.square() / 2
        case "k3":
            # expm1 keeps the digits of small differences; the clamp removes a rounding error below zero. Where it does,
            # the true gradient is below that error too.
            return (torch.expm1(bounded) - bounded).clamp_min(0)
        case _:
            raise ValueError(f"estimator must be 'k1', 'k2' or 'k3'; it is {estimator!r}")

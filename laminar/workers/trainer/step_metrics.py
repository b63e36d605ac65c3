"""What a step reports. Invariant: a figure is the same on all ranks, whatever the number of ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from laminar.algorithms.importance_sampling import ImportanceWeightMetrics
from laminar.algorithms.kl import MismatchMetrics, ReferenceKLMetrics
from laminar.algorithms.policy_loss import PolicyLossMetrics
from laminar.algorithms.token_metrics import TokenMetrics, masked_sum
from laminar.workers.trainer.batch import MicroBatch, StepBatch
from laminar.workers.trainer.ranks import Ranks

Metrics = TypeVar("Metrics", bound=TokenMetrics)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EntropyMetrics(TokenMetrics):
    """Entropy of the policy, summed over loss tokens."""

    entropy_sum: torch.Tensor  # float64 []

    @property
    def entropy(self) -> float:
        """Mean entropy in nats per token."""
        return self._per_token(self.entropy_sum)


@dataclass(kw_only=True, slots=True, frozen=True)
class Update:
    """One optimizer update."""

    loss: float  # of the mini-batch, over all ranks
    grad_norm: float  # before clipping
    forward_backward_s: float
    optimizer_s: float


class StepMetrics:
    """Collects over the micro-batches of a step on one rank, then sums up over ranks."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self._policy: PolicyLossMetrics | None = None
        self._mismatch: MismatchMetrics | None = None
        self._importance: ImportanceWeightMetrics | None = None
        self._reference: ReferenceKLMetrics | None = None
        self._entropy: EntropyMetrics | None = None
        self._tokens = 0
        self._padded_tokens = 0
        self._micro_batches = 0

    def add_pass(
        self,
        micro_batch: MicroBatch,
        policy: PolicyLossMetrics,
        mismatch: MismatchMetrics,
        importance: ImportanceWeightMetrics | None,
        reference: ReferenceKLMetrics | None,
        entropies: torch.Tensor,  # float32 [N]
    ) -> None:
        """Note what one micro-batch gave."""
        mask = micro_batch.loss_mask
        entropy = EntropyMetrics(
            tokens=masked_sum(torch.ones_like(entropies), mask), entropy_sum=masked_sum(entropies, mask)
        )
        self._policy = _plus(self._policy, policy)
        self._mismatch = _plus(self._mismatch, mismatch)
        self._importance = _plus(self._importance, importance)
        self._reference = _plus(self._reference, reference)
        self._entropy = _plus(self._entropy, entropy)
        self._tokens += micro_batch.tokens
        self._padded_tokens += micro_batch.token_ids.numel()
        self._micro_batches += 1

    def summary(self, batch: StepBatch, ranks: Ranks, learning_rate: float) -> dict[str, float]:
        """All metrics of the step; a collective call."""
        rewards = torch.from_numpy(batch.message.rewards.copy()).double()
        result = {
            "reward_mean": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "advantage_abs_mean": float(abs(batch.advantages).mean()),
            "learning_rate": learning_rate,
            "trained_tokens": float(batch.lengths.sum()),
            "response_tokens": float(batch.response_lengths.sum()),
            "loss": _mean([update.loss for update in self.updates]),
            "grad_norm": _mean([update.grad_norm for update in self.updates]),
        }
        seconds = [
            sum(update.forward_backward_s for update in self.updates),
            sum(update.optimizer_s for update in self.updates),
        ]
        counted = torch.tensor([*seconds, self._tokens, self._padded_tokens, self._micro_batches], dtype=torch.float64)
        forward_backward_s, optimizer_s, tokens, padded_tokens, micro_batches = ranks.sum(counted).tolist()
        result |= {
            "forward_backward_s": forward_backward_s / ranks.size,
            "optimizer_s": optimizer_s / ranks.size,
            "padded_fraction": 1 - tokens / padded_tokens if padded_tokens else 0.0,
            "micro_batches": micro_batches / ranks.size,
        }
        # Whether a kind of metric exists is the same on every rank: it hangs on the config, and every rank makes
        # the same number of passes.
        if self._policy and self._mismatch and self._entropy:
            policy = self._policy.reduced(ranks.sum, ranks.max)
            result |= {
                "clip_fraction_high": policy.clip_fraction_high,
                "clip_fraction_low": policy.clip_fraction_low,
                "ratio_max": policy.ratio_max.item(),
                "mismatch_kl": self._mismatch.reduced(ranks.sum, ranks.max).mismatch_kl,
                "entropy": self._entropy.reduced(ranks.sum, ranks.max).entropy,
            }
        if self._importance:
            importance = self._importance.reduced(ranks.sum, ranks.max)
            result["importance_capped_fraction"] = importance.capped_fraction
        if self._reference:
            result["kl_reference"] = self._reference.reduced(ranks.sum, ranks.max).reference_kl
        return result


def _plus(total: Metrics | None, more: Metrics | None) -> Metrics | None:
    return more if total is None else total if more is None else total + more


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""What a step reports. Invariant: a figure is the same on all ranks, whatever the number of ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from laminar.algorithms.importance_sampling import ImportanceWeightMetrics
from laminar.algorithms.kl import MismatchMetrics, ReferenceKLMetrics
from laminar.algorithms.policy_losses import PolicyLossMetrics
from laminar.algorithms.token_metrics import TokenMetrics, masked_sum
from laminar.algorithms.value_loss import ValueMetrics
from laminar.workers.trainer.batch import MicroBatch, StepBatch
from laminar.workers.trainer.ranks import Ranks
from laminar.workers.trainer.update import Update


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EntropyMetrics(TokenMetrics):
    """Entropy of the policy, summed over loss tokens."""

    entropy_sum: torch.Tensor  # float64 []

    @classmethod
    def of(cls, entropies: torch.Tensor, mask: torch.Tensor) -> Self:
        """Of tokens' entropies, float [N]; mask bool [N]."""
        return cls(tokens=masked_sum(torch.ones_like(entropies), mask), entropy_sum=masked_sum(entropies, mask))

    @property
    def entropy(self) -> float:
        """Mean entropy in nats per token."""
        return self._per_token(self.entropy_sum)


class StepMetrics:
    """Collects over the micro-batches of a step on one rank, then sums up over ranks."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.critic_updates: list[Update] = []
        self.advantages: NDArray[np.float32] = np.zeros(0, np.float32)  # [loss tokens of the step]
        self.overlong_penalties: NDArray[np.float64] | None = None  # float64 [B]
        self._collected: dict[type[TokenMetrics], TokenMetrics] = {}
        self._tokens = 0
        self._padded_tokens = 0
        self._micro_batches = 0

    def add_pass(self, micro_batch: MicroBatch) -> None:
        """Note a forward and backward pass of the actor."""
        self._tokens += micro_batch.tokens
        self._padded_tokens += micro_batch.token_ids.numel()
        self._micro_batches += 1

    def add(self, more: TokenMetrics) -> None:
        """Note what one micro-batch gave."""
        kind = type(more)
        self._collected[kind] = self._collected[kind] + more if kind in self._collected else more

    def summary(self, batch: StepBatch, ranks: Ranks, learning_rate: float) -> dict[str, float]:
        """All metrics of the step; a collective call."""
        rewards = torch.from_numpy(batch.message.rewards.copy()).double()
        result = {
            "reward_mean": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "advantage_abs_mean": float(np.abs(self.advantages).mean()) if len(self.advantages) else 0.0,
            "learning_rate": learning_rate,
            "trained_tokens": float(batch.lengths.sum()),
            "response_tokens": float(batch.response_lengths.sum()),
            "loss": _mean([update.loss for update in self.updates]),
            "grad_norm": _mean([update.grad_norm for update in self.updates]),
        }
        if self.overlong_penalties is not None:
            result["overlong_penalty"] = float(self.overlong_penalties.mean())
        if self.critic_updates:
            result["value_loss"] = _mean([update.loss for update in self.critic_updates])
            result["critic_grad_norm"] = _mean([update.grad_norm for update in self.critic_updates])
        result |= self._passes(ranks)
        # Which kinds of metrics there are is the same on every rank, and so is their order: both hang on the config, and
        # every rank makes the same number of passes.
        for metrics in self._collected.values():
            result |= _figures(metrics.reduced(ranks.sum, ranks.max))
        return result

    def _passes(self, ranks: Ranks) -> dict[str, float]:
        made = [*self.updates, *self.critic_updates]
        seconds = [sum(update.forward_backward_s for update in made), sum(update.optimizer_s for update in made)]
        counted = torch.tensor([*seconds, self._tokens, self._padded_tokens, self._micro_batches], dtype=torch.float64)
        forward_backward_s, optimizer_s, tokens, padded_tokens, micro_batches = ranks.sum(counted).tolist()
        return {
            "forward_backward_s": forward_backward_s / ranks.size,
            "optimizer_s": optimizer_s / ranks.size,
            "padded_fraction": 1 - tokens / padded_tokens if padded_tokens else 0.0,
            "micro_batches": micro_batches / ranks.size,
        }


def _figures(metrics: TokenMetrics) -> dict[str, float]:
    match metrics:
        case PolicyLossMetrics():
            return {
                "clip_fraction_high": metrics.clip_fraction_high,
                "clip_fraction_low": metrics.clip_fraction_low,
                "ratio_max": metrics.ratio_max.item(),
            }
        case MismatchMetrics():
            return {"mismatch_kl": metrics.mismatch_kl}
        case EntropyMetrics():
            return {"entropy": metrics.entropy}
        case ImportanceWeightMetrics():
            return {"importance_cut_fraction": metrics.cut_fraction, "importance_weight_mean": metrics.weight_mean}
        case ReferenceKLMetrics():
            return {"kl_reference": metrics.reference_kl}
        case ValueMetrics():
            return {
                "value_mean": metrics.value_mean,
                "value_clip_fraction": metrics.clip_fraction,
                "value_explained_variance": metrics.explained_variance,
            }
    raise RuntimeError(f"no figures for {type(metrics).__name__}")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""Our losses against TRL's own code on the same tensors: value, gradient and metrics.

TRL computes its loss inside `GRPOTrainer._compute_loss`. It is called here unbound, on a stand-in that has just the
settings that the method reads and whose forward pass returns given logprobs.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from laminar.algorithms.advantages import group_advantages
from laminar.algorithms.importance_sampling import truncated_importance_weights
from laminar.algorithms.kl import mismatch_kl, reference_kl
from laminar.algorithms.logprobs import token_entropy, token_logprobs
from laminar.algorithms.policy_loss import policy_loss

with warnings.catch_warnings():
    # Importing TRL warns about the installed vLLM, which is not used here.
    warnings.simplefilter("ignore")
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import entropy_from_logits, nanstd, selective_log_softmax

ROWS, PROMPT, LONGEST = 12, 3, 10
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class OneProcess:
    """The collectives of an accelerator with a single process."""

    num_processes = 1

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor


def trl_loss(logprobs, inputs, *, beta=0.0, use_vllm=False, loss_type="dapo"):
    """Loss and metrics of TRL for `logprobs` [B, T]."""
    metrics = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        _entropy_bonus_enabled=False,
        _metrics=metrics,
        accelerator=OneProcess(),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=CLIP_HIGH,
        epsilon_low=CLIP_LOW,
        importance_sampling_level="token",
        loss_type=loss_type,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=use_vllm,
        vllm_importance_sampling_correction=use_vllm,
    )
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, {name: values[0] for name, values in metrics["train"].items()}


def batch(seed):
    """A random batch: logprobs with gradient, and what both implementations are given."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(1, LONGEST + 1, (ROWS,), generator=generator)
    mask = (torch.arange(LONGEST)[None] < lengths[:, None]).long()
    mask[0, 2:4] = 0  # a tool's observation amid the response
    old = -torch.rand(ROWS, LONGEST, generator=generator) * 3
    inputs = {
        "prompt_ids": torch.zeros(ROWS, PROMPT, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, LONGEST, dtype=torch.long),
        "completion_mask": mask,
        "advantages": normal(ROWS),
        "old_per_token_logps": old,
        "ref_per_token_logps": old + 0.5 * normal(ROWS, LONGEST),
        "num_items_in_batch": mask.sum(),
    }
    engine = old + 0.6 * normal(ROWS, LONGEST)
    logprobs = (old + 0.4 * normal(ROWS, LONGEST)).requires_grad_()
    return logprobs, engine, inputs


def same_loss_and_gradient(ours, theirs, logprobs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    (our_gradient,) = torch.autograd.grad(ours, logprobs)
    (their_gradient,) = torch.autograd.grad(theirs, logprobs)
    assert their_gradient.abs().max() > 1e-3
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_and_clip_fractions(seed):
    logprobs, _, inputs = batch(seed)
    mask = inputs["completion_mask"]
    theirs, their_metrics = trl_loss(logprobs, inputs)
    ours, metrics = policy_loss(
        logprobs,
        inputs["old_per_token_logps"],
        inputs["advantages"],
        mask,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        normalizer=int(mask.sum()),
    )
    same_loss_and_gradient(ours, theirs, logprobs)
    assert metrics.clip_fraction_low == pytest.approx(their_metrics["clip_ratio/low_mean"], abs=1e-6)
    assert metrics.clip_fraction_high == pytest.approx(their_metrics["clip_ratio/high_mean"], abs=1e-6)
    assert metrics.clip_fraction_low > 0 and metrics.clip_fraction_high > 0


@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_with_importance_weights_and_reference_kl(seed):
    logprobs, engine, inputs = batch(seed)
    mask, old = inputs["completion_mask"], inputs["old_per_token_logps"]
    normalizer, beta, cap = int(mask.sum()), 0.04, 2.0
    # TRL's truncation, as in its _generate_and_score_completions with mode "token_truncate".
    inputs["importance_sampling_ratio"] = torch.clamp(torch.exp((old - engine) * mask), max=cap)
    theirs, their_metrics = trl_loss(logprobs, inputs, beta=beta, use_vllm=True)

    weights = truncated_importance_weights(old, engine, cap=cap)
    assert (weights == cap).any()
    policy, _ = policy_loss(
        logprobs,
        old,
        inputs["advantages"],
        mask,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        importance_weights=weights,
        normalizer=normalizer,
    )
    kl, kl_metrics = reference_kl(logprobs, inputs["ref_per_token_logps"], mask, normalizer=normalizer)
    same_loss_and_gradient(policy + beta * kl, theirs, logprobs)
    assert kl_metrics.reference_kl == pytest.approx(their_metrics["kl"], rel=1e-5)


def test_the_comparison_would_notice_another_aggregation():
    # "grpo" averages per trajectory first: on trajectories of different lengths that is another loss.
    logprobs, _, inputs = batch(0)
    by_tokens, _ = trl_loss(logprobs, inputs)
    by_trajectories, _ = trl_loss(logprobs, inputs, loss_type="grpo")
    assert abs(by_tokens - by_trajectories) > 1e-3


def test_mismatch_is_the_kl_that_trl_computes_with_the_engine_as_policy():
    logprobs, engine, inputs = batch(1)
    inputs["ref_per_token_logps"] = logprobs.detach()
    _, their_metrics = trl_loss(engine, inputs, beta=1.0)
    metrics = mismatch_kl(engine, logprobs, inputs["completion_mask"])
    assert metrics.mismatch_kl == pytest.approx(their_metrics["kl"], rel=1e-5)


def test_advantages_use_the_standard_deviation_that_trl_uses():
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    theirs = (rewards - rewards.mean(1, keepdim=True)) / (nanstd(rewards, dim=1)[:, None] + 1e-4)
    ours = group_advantages(rewards.numpy().ravel(), np.repeat(np.arange(5), 8), epsilon=1e-4)
    np.testing.assert_allclose(ours, theirs.numpy().ravel(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_and_entropy(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(4, 6, 50, generator=generator)).requires_grad_()
    targets = torch.randint(0, 50, (4, 6), generator=generator)
    theirs = selective_log_softmax(logits / temperature, targets)
    ours = token_logprobs(logits, targets, temperature)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(ours.square().sum(), logits), torch.autograd.grad(theirs.square().sum(), logits)
    )
    torch.testing.assert_close(token_entropy(logits, temperature), entropy_from_logits(logits.detach() / temperature))

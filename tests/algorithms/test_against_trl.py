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

from laminar.algorithms.advantages import RewardedBatch, grpo
from laminar.algorithms.aggregation import token_weights
from laminar.algorithms.importance_sampling import truncated_weights
from laminar.algorithms.kl import mismatch_kl, reference_kl
from laminar.algorithms.logprobs import token_entropy, token_logprobs
from laminar.algorithms.policy_losses import PolicyTokens, cispo, dapo, gspo, policy_loss_metrics

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


def trl_loss(logprobs, inputs, *, beta=0.0, use_vllm=False, loss_type="dapo", importance_sampling_level="token"):
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
        importance_sampling_level=importance_sampling_level,
        loss_type=loss_type,
        max_completion_length=LONGEST,
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


def packed(logprobs, engine, inputs):
    mask = inputs["completion_mask"].bool()
    return PolicyTokens(
        logprobs=logprobs[mask],
        old_logprobs=inputs["old_per_token_logps"][mask],
        engine_logprobs=engine[mask],
        advantages=inputs["advantages"][:, None].expand_as(mask)[mask],
        loss_mask=mask[mask],
        trajectories=torch.arange(ROWS)[:, None].expand_as(mask)[mask],
    )


def aggregated(values, inputs, aggregation="token"):
    mask = inputs["completion_mask"]
    weights = token_weights(mask.sum(-1).numpy(), aggregation=aggregation, max_response_tokens=LONGEST)
    return (values * torch.from_numpy(weights).float()[:, None].expand_as(mask)[mask.bool()]).sum()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [("dapo", "token"), ("grpo", "trajectory"), ("dr_grpo", "constant")]
)
def test_policy_loss_and_clip_fractions(seed, loss_type, aggregation):
    logprobs, engine, inputs = batch(seed)
    theirs, their_metrics = trl_loss(logprobs, inputs, loss_type=loss_type)
    tokens = packed(logprobs, engine, inputs)
    losses = dapo(tokens)
    same_loss_and_gradient(aggregated(losses.values, inputs, aggregation), theirs, logprobs)
    metrics = policy_loss_metrics(losses, tokens.loss_mask)
    assert metrics.clip_fraction_low == pytest.approx(their_metrics["clip_ratio/low_mean"], abs=1e-6)
    assert metrics.clip_fraction_high == pytest.approx(their_metrics["clip_ratio/high_mean"], abs=1e-6)
    assert metrics.clip_fraction_low > 0 and metrics.clip_fraction_high > 0


@pytest.mark.parametrize("seed", range(3))
def test_gspo(seed):
    logprobs, engine, inputs = batch(seed)
    theirs, _ = trl_loss(logprobs, inputs, loss_type="grpo", importance_sampling_level="sequence")
    losses = gspo(packed(logprobs, engine, inputs), clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    same_loss_and_gradient(aggregated(losses.values, inputs, "trajectory"), theirs, logprobs)


@pytest.mark.parametrize("seed", range(3))
def test_cispo(seed):
    logprobs, engine, inputs = batch(seed)
    theirs, _ = trl_loss(logprobs, inputs, loss_type="cispo")  # bounds the weight by CLIP_HIGH itself: below 1
    losses = cispo(packed(logprobs, engine, inputs), clip_high=CLIP_HIGH - 1)
    same_loss_and_gradient(aggregated(losses.values, inputs), theirs, logprobs)


@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_with_importance_weights_and_reference_kl(seed):
    logprobs, engine, inputs = batch(seed)
    mask, old = inputs["completion_mask"], inputs["old_per_token_logps"]
    beta, cap = 0.04, 2.0
    # TRL's truncation, as in its _generate_and_score_completions with mode "token_truncate".
    inputs["importance_sampling_ratio"] = torch.clamp(torch.exp((old - engine) * mask), max=cap)
    theirs, their_metrics = trl_loss(logprobs, inputs, beta=beta, use_vllm=True)

    tokens = packed(logprobs, engine, inputs)
    importance = truncated_weights(
        tokens.old_logprobs, tokens.engine_logprobs, tokens.loss_mask, tokens.trajectories, cap=cap
    )
    assert importance.cut.any()
    kl, kl_metrics = reference_kl(tokens.logprobs, inputs["ref_per_token_logps"][mask.bool()], tokens.loss_mask)
    ours = aggregated(dapo(tokens).values * importance.weights + beta * kl, inputs)
    same_loss_and_gradient(ours, theirs, logprobs)
    assert kl_metrics.reference_kl == pytest.approx(their_metrics["kl"], rel=1e-5)


def test_mismatch_is_the_kl_that_trl_computes_with_the_engine_as_policy():
    logprobs, engine, inputs = batch(1)
    inputs["ref_per_token_logps"] = logprobs.detach()
    _, their_metrics = trl_loss(engine, inputs, beta=1.0)
    metrics = mismatch_kl(engine, logprobs, inputs["completion_mask"])
    assert metrics.mismatch_kl == pytest.approx(their_metrics["kl"], rel=1e-5)


def test_advantages_use_the_standard_deviation_that_trl_uses():
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    theirs = (rewards - rewards.mean(1, keepdim=True)) / (nanstd(rewards, dim=1)[:, None] + 1e-4)
    batch = RewardedBatch(
        rewards=rewards.numpy().ravel().astype(np.float64),
        group_ids=np.repeat(np.arange(5), 8),
        response_lengths=np.ones(40, np.int64),
        loss_mask=np.ones(40, bool),
        token_rewards=np.zeros(40),
    )
    ours = grpo(batch, epsilon=1e-4)
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

"""Whole steps of the actor under combinations of the config's algorithm, against plain code: a forward pass per trajectory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import make_model
from tests.workers.trainer.batches import largest_difference, parameters_of, random_step, trajectories
from tests.workers.trainer.test_actor import grpo_of


def naive_tokens(model, message):
    """Per trajectory (logprobs, entropies) of its loss tokens."""
    result = []
    for token_ids, prompt, mask, _ in trajectories(message):
        logprobs = torch.log_softmax(model(input_ids=token_ids[None]).logits[0, prompt - 1 : -1], -1)
        chosen = logprobs.gather(-1, token_ids[prompt:, None])[:, 0]
        result.append((chosen[mask], -(logprobs.exp() * logprobs).sum(-1)[mask]))
    return result


def gradients_of(actor, message):
    found = {}
    actor.optimizer.step = lambda: found.update(
        {name: parameter.grad.clone() for name, parameter in actor.model.named_parameters()}
    )
    metrics = actor.train_step(message)
    return found, metrics


def assert_gradient(actor, message, model_folder, loss_of):
    """`loss_of([(logprobs, entropies, engine)])` is the whole loss in plain code."""
    gradients, metrics = gradients_of(actor, message)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    engines = [engine[mask] for _, _, mask, engine in trajectories(message)]
    tokens = [(*own, engine) for own, engine in zip(naive_tokens(model, message), engines, strict=True)]
    loss = loss_of(tokens)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=2e-3, atol=2e-6)
    return metrics


def test_cispo_against_the_behavior_policy(make_actor, model_folder):
    actor = make_actor(
        algorithm={"loss": "cispo", "old_policy": "behavior", "clip_high": 0.2, "aggregation": "constant"},
        max_tokens_per_micro_batch=60,
    )
    message = random_step(seed=3)

    def loss_of(tokens):
        total = torch.zeros(())
        for advantage, (logprobs, _, engine) in zip(grpo_of(message), tokens, strict=True):
            weights = (logprobs.detach() - engine).exp().clamp(max=1.2)
            total = total - (weights * advantage * logprobs).sum()
        return total / (sum(len(own[0]) > 0 for own in tokens) * actor.config.rollout.max_response_tokens)

    metrics = assert_gradient(actor, message, model_folder, loss_of)
    assert metrics["clip_fraction_high"] > 0 and metrics["ratio_max"] > 1
    assert "importance_cut_fraction" not in metrics


def test_gspo_with_masked_importance_and_dr_grpo(make_actor, model_folder):
    correction = {"method": "mis", "level": "geometric", "floor": 0.8, "cap": 1.1}
    actor = make_actor(
        algorithm={"advantage": "dr_grpo", "loss": "gspo", "correction": correction}, max_tokens_per_micro_batch=60
    )
    message = random_step(seed=4)
    kept = []

    def loss_of(tokens):
        terms = []
        for row, (logprobs, _, engine) in enumerate(tokens):
            if not len(logprobs):
                continue
            own = message.rewards[message.group_ids == message.group_ids[row]]
            ratio = (logprobs - logprobs.detach()).mean().exp()
            weight = (logprobs.detach() - engine).mean().exp()
            kept.append(0.8 <= weight <= 1.1)
            terms.append(-ratio * float(message.rewards[row] - own.mean()) * (weight if kept[-1] else 0.0))
        return sum(terms) / len(terms)

    metrics = assert_gradient(actor, message, model_folder, loss_of)
    assert any(kept) and not all(kept)
    assert 0 < metrics["importance_cut_fraction"] < 1


def test_decoupled_ppo_weighs_by_proximal_over_behavior(make_actor, model_folder):
    actor = make_actor(algorithm={"loss": "decoupled_ppo", "behavior_cap": 1.3}, max_tokens_per_micro_batch=60)
    message = random_step(seed=5)

    def loss_of(tokens):
        total, count = torch.zeros(()), 0
        for advantage, (logprobs, _, engine) in zip(grpo_of(message), tokens, strict=True):
            weights = (logprobs.detach() - engine).exp()
            weights = torch.where(weights > 1.3, 0.0, weights)
            total = total - (weights * advantage * (logprobs - logprobs.detach()).exp()).sum()
            count += len(logprobs)
        return total / count

    assert_gradient(actor, message, model_folder, loss_of)


def test_entropy_bonus_and_k2_to_a_reference(make_actor, model_folder, tmp_path):
    reference_path = make_model(tmp_path / "reference", seed=9)
    kl = {"coefficient": 0.3, "estimator": "k2", "reference_path": str(reference_path)}
    actor = make_actor(
        algorithm={"kl": kl, "entropy_coefficient": 0.2, "correction": {"method": "none"}},
        max_tokens_per_micro_batch=60,
    )
    message = random_step(seed=6)
    reference = AutoModelForCausalLM.from_pretrained(reference_path, dtype=torch.float32)
    with torch.no_grad():
        fixed = naive_tokens(reference, message)

    def loss_of(tokens):
        total, count = torch.zeros(()), 0
        for advantage, (logprobs, entropies, _), (other, _) in zip(grpo_of(message), tokens, fixed, strict=True):
            ratio = (logprobs - logprobs.detach()).exp()
            total = total - (ratio * advantage + 0.2 * entropies - 0.3 * (logprobs - other) ** 2 / 2).sum()
            count += len(logprobs)
        return total / count

    metrics = assert_gradient(actor, message, model_folder, loss_of)
    assert metrics["kl_reference"] > 0.1


def test_kl_and_length_in_the_reward(make_actor, model_folder, tmp_path):
    reference_path = make_model(tmp_path / "reference", seed=9)
    kl = {"coefficient": 0.3, "estimator": "k1", "apply_to": "reward", "reference_path": str(reference_path)}
    actor = make_actor(
        algorithm={"kl": kl, "overlong": {"buffer_tokens": 1020}, "correction": {"method": "none"}},
        max_tokens_per_micro_batch=60,
    )
    message = random_step(seed=6)
    limit = actor.config.rollout.max_response_tokens - 1020  # 4 tokens
    reference = AutoModelForCausalLM.from_pretrained(reference_path, dtype=torch.float32)
    with torch.no_grad():
        fixed = naive_tokens(reference, message)

    def loss_of(tokens):
        penalties = [0.3 * (own[0] - other[0]).sum().item() for own, other in zip(tokens, fixed, strict=True)]
        lengths = np.maximum(0, message.response_lengths - limit) / 1020
        shaped = dataclasses.replace(message, rewards=message.rewards - np.array(penalties) - lengths)
        total, count = torch.zeros(()), 0
        for advantage, (logprobs, _, _) in zip(grpo_of(shaped), tokens, strict=True):
            total = total - (advantage * (logprobs - logprobs.detach()).exp()).sum()
            count += len(logprobs)
        return total / count

    metrics = assert_gradient(actor, message, model_folder, loss_of)
    assert metrics["reward_mean"] == pytest.approx(message.rewards.mean(), rel=1e-6)
    assert metrics["overlong_penalty"] < 0
    assert "kl_reference" in metrics


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "gspo", "clip_high": 0.05, "correction": {"method": "mis", "level": "trajectory", "cap": 3.0}},
        {"advantage": "reinforce++", "gamma": 0.9, "loss": "ppo", "dual_clip": 3.0, "aggregation": "trajectory"},
        {"advantage": "rloo", "loss": "decoupled_ppo", "kl": {"coefficient": 0.1, "apply_to": "reward"}},
        {"loss": "cispo", "old_policy": "behavior", "entropy_coefficient": 0.1, "aggregation": "constant"},
    ],
)
def test_update_does_not_depend_on_micro_batches(make_actor, algorithm):
    message = random_step(seed=6, groups=6, mini_batches=2)
    results = []
    for budget in (10_000, 30):
        actor = make_actor(max_tokens_per_micro_batch=budget, algorithm=algorithm)
        actor.optimizer = torch.optim.SGD(actor.parameters, lr=1.0)
        results.append((actor.train_step(message), parameters_of(actor)))
    assert results[1][0]["micro_batches"] > 8
    assert largest_difference(results[0][1], results[1][1]) < 2e-6
    for name in ("loss", "clip_fraction_high", "mismatch_kl", "advantage_abs_mean"):
        assert results[1][0][name] == pytest.approx(results[0][0][name], rel=1e-3, abs=1e-6), name


def test_empty_responses_and_groups_of_one_are_trained_around(make_actor):
    message = random_step(groups=8, group_size=1, lengths=(0, 3), masked=False, seed=8)
    assert (message.response_lengths == 0).any()
    for advantage in ("reinforce++", "gae"):
        actor = make_actor(group_size=1, algorithm={"advantage": advantage, "loss": "gspo"})
        metrics = actor.train_step(message)
        assert np.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0

"""PPO with a critic: what it learns, and that it is saved and restored with the actor."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from laminar.errors import RunFailed, UserError
from laminar.workers.trainer.checkpoint import load_checkpoint, needed_bytes, save_checkpoint
from laminar.workers.trainer.critic import named_state
from tests.workers.trainer.batches import largest_difference, parameters_of, random_step, trajectories
from tests.workers.trainer.test_checkpoint import nbytes, order

PPO = {"advantage": "gae", "loss": "ppo", "critic": {"optimizer": {"learning_rate": 1e-3}}}
FIGURES = {
    "value_loss",
    "critic_grad_norm",
    "value_mean",
    "value_clip_fraction",
    "value_explained_variance",
}


def state_of(actor):
    return {name: tensor.detach().clone() for name, tensor in named_state(actor.critic).items()}


def test_the_first_values_are_zero_and_returns_the_rewards(make_actor, model_folder):
    """One step of PPO written down: advantages are the whitened rewards; the critic's loss is half the squared reward."""
    actor = make_actor(algorithm=PPO)
    message = random_step(seed=2)
    gradients = {}
    actor.optimizer.step = lambda: gradients.update(
        {name: parameter.grad.clone() for name, parameter in actor.model.named_parameters()}
    )
    metrics = actor.train_step(message)
    assert metrics.keys() >= FIGURES
    assert metrics["value_mean"] == 0
    counts = np.array([int(mask.sum()) for _, _, mask, _ in trajectories(message)])
    assert metrics["value_loss"] == pytest.approx((counts * message.rewards**2 / 2).sum() / counts.sum(), rel=1e-5)

    earned = np.repeat(message.rewards, counts).astype(np.float64)
    whitened = (message.rewards - earned.mean()) / (earned.std(ddof=1) + 1e-6)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    total = torch.zeros(())
    for advantage, (token_ids, prompt, mask, engine) in zip(whitened, trajectories(message), strict=True):
        logits = model(input_ids=token_ids[None]).logits[0, prompt - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, token_ids[prompt:, None])[:, 0]
        weights = (logprobs.detach() - engine).exp().clamp(max=2.0)
        total = total - (weights * float(advantage) * logprobs)[mask].sum()
    (total / counts.sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_the_critic_learns_what_trajectories_earn(make_actor):
    actor = make_actor(algorithm=PPO, steps=60)
    rewards = np.tile([1.0, 0.0, 1.0, 0.0], 4).astype(np.float32)
    figures = []
    for step in range(1, 31):
        message = dataclasses.replace(random_step(step, seed=5, masked=False), rewards=rewards)
        figures.append(actor.train_step(message))
    assert figures[-1]["value_loss"] < figures[0]["value_loss"] / 4
    assert figures[-1]["value_explained_variance"] > 0.5 > figures[0]["value_explained_variance"]


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_update_does_not_depend_on_micro_batches(make_actor, mini_batches):
    message = random_step(seed=6, groups=6, mini_batches=mini_batches)
    kl = {"coefficient": 0.1, "apply_to": "reward", "estimator": "k1"}
    results = []
    for budget in (10_000, 120, 30):
        actor = make_actor(max_tokens_per_micro_batch=budget, algorithm={**PPO, "kl": kl, "gae_lambda": 0.9})
        actor.optimizer = torch.optim.SGD(actor.parameters, lr=1.0)
        actor.critic.optimizer = torch.optim.SGD(actor.critic.parameters, lr=1.0)
        actor.train_step(message)
        metrics = actor.train_step(message)
        results.append((parameters_of(actor), state_of(actor), metrics))
    for weights, critic, metrics in results[1:]:
        assert largest_difference(results[0][0], weights) < 2e-6
        assert largest_difference(results[0][1], critic) < 2e-6
        for name in FIGURES | {"kl_reference", "loss"}:
            assert metrics[name] == pytest.approx(results[0][2][name], rel=1e-3, abs=1e-6), name


def test_round_trip_and_the_next_step_is_the_same(make_actor, tmp_path):
    actor = make_actor(algorithm=PPO)
    actor.train_step(random_step(1))
    saved = save_checkpoint(actor, order(tmp_path / "step-1"))
    assert saved.error == ""
    assert needed_bytes(actor) >= saved.nbytes == nbytes(tmp_path / "step-1")
    at_save = state_of(actor)
    actor.train_step(random_step(2))
    after, after_critic = parameters_of(actor), state_of(actor)

    other = make_actor(algorithm=PPO)
    load_checkpoint(other, tmp_path / "step-1")
    assert largest_difference(at_save, state_of(other)) == 0
    other.train_step(random_step(2))
    assert largest_difference(after, parameters_of(other)) == 0
    assert largest_difference(after_critic, state_of(other)) == 0
    # The export is the actor's alone.
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1" / "huggingface")
    assert set(exported.state_dict()) == set(actor.model.state_dict())


def test_checkpoint_without_a_critic_is_refused_where_one_is_needed(make_actor, tmp_path):
    assert save_checkpoint(make_actor(), order(tmp_path / "step-1")).error == ""
    with pytest.raises(UserError, match="step-1 does not fit the model"):
        load_checkpoint(make_actor(algorithm=PPO), tmp_path / "step-1")


def test_value_loss_that_is_not_finite_is_not_applied(make_actor):
    actor = make_actor(algorithm=PPO)
    with torch.no_grad():
        actor.critic.model.head.bias[0] = float("nan")
    before = parameters_of(actor)
    with pytest.raises(RunFailed, match="step 1: value_loss is not finite .*algorithm.critic.optimizer.learning_rate"):
        actor.train_step(random_step(1))
    assert largest_difference(before, parameters_of(actor)) == 0


def test_a_critic_of_its_own_and_bfloat16(make_actor, tmp_path):
    from tests.tiny_models import make_model

    path = make_model(tmp_path / "critic", seed=4, hidden=128)
    actor = make_actor(algorithm={**PPO, "critic": {"path": str(path)}}, dtype="bfloat16", gradient_checkpointing=True)
    assert actor.critic.model.head.in_features == 128
    assert "a critic beside it" in actor.describe()
    metrics = actor.train_step(random_step(1))
    assert metrics["critic_grad_norm"] > 0
    assert all(parameter.dtype == torch.float32 for parameter in actor.critic.parameters)

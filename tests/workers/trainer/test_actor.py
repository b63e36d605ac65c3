from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from laminar.errors import RunFailed, UserError
from laminar.protocol.messages import TrainStep
from laminar.workers.trainer.batch import StepBatch
from tests.tiny_models import make_model
from tests.workers.trainer.batches import largest_difference, parameters_of, random_step, trajectories

METRICS = {
    "loss",
    "reward_mean",
    "reward_std",
    "advantage_abs_mean",
    "mismatch_kl",
    "importance_cut_fraction",
    "importance_weight_mean",
    "clip_fraction_high",
    "clip_fraction_low",
    "ratio_max",
    "entropy",
    "grad_norm",
    "learning_rate",
    "trained_tokens",
    "response_tokens",
    "padded_fraction",
    "micro_batches",
    "forward_backward_s",
    "optimizer_s",
}


def naive_logprobs(model, message):
    """Per trajectory, logprobs of all response tokens: a forward pass each, nothing of the trainer's code."""
    result = []
    for token_ids, prompt, _, _ in trajectories(message):
        logits = model(input_ids=token_ids[None]).logits[0, prompt - 1 : -1]
        result.append(torch.log_softmax(logits, -1).gather(-1, token_ids[prompt:, None])[:, 0])
    return result


def naive_updates(folder, message, mini_batches, *, learning_rate, kl_coefficient=0.0, reference=None):
    """GRPO with clip-higher and truncated importance sampling, written down as it is in the papers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    with torch.no_grad():
        old = naive_logprobs(model, message)
        fixed = naive_logprobs(reference, message) if reference else old
    losses = []
    for rows in mini_batches:
        new = naive_logprobs(model, message)
        total, tokens = torch.zeros(()), 0
        for row, (_, _, mask, engine) in enumerate(trajectories(message)):
            if row not in rows:
                continue
            rewards = message.rewards[message.group_ids == message.group_ids[row]]
            advantage = float((message.rewards[row] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))
            for t in range(len(mask)):
                if mask[t]:
                    ratio = (new[row][t] - old[row][t]).exp()
                    weight = min(math.exp(old[row][t] - engine[t]), 2.0)
                    clipped = ratio.clamp(0.8, 1.28)
                    total = total - weight * torch.minimum(ratio * advantage, clipped * advantage)
                    difference = fixed[row][t] - new[row][t]
                    total = total + kl_coefficient * (difference.exp() - 1 - difference)
                    tokens += 1
        loss = total / tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return dict(model.named_parameters()), losses


def grpo_of(message):
    """Advantages as written down in the paper."""
    groups = {group: message.rewards[message.group_ids == group] for group in set(message.group_ids.tolist())}
    return [
        float((reward - groups[group].mean()) / (groups[group].std(ddof=1) + 1e-6))
        for reward, group in zip(message.rewards, message.group_ids.tolist(), strict=True)
    ]


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.5])
def test_update_equals_a_plain_implementation(make_actor, model_folder, tmp_path, mini_batches, kl_coefficient):
    algorithm = {"kl": {"coefficient": kl_coefficient}}
    reference = None
    if kl_coefficient:
        algorithm["kl"]["reference_path"] = str(make_model(tmp_path, seed=9))
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    # 1e-5: Adam's first updates follow the sign of the gradient, and where that is a rounding error so is the sign.
    actor = make_actor(algorithm=algorithm, optimizer={"learning_rate": 1e-5})
    message = random_step(seed=2, mini_batches=mini_batches)
    rows = StepBatch(message).mini_batches(mini_batches)
    assert len(rows) == mini_batches
    expected, losses = naive_updates(
        model_folder, message, rows, learning_rate=1e-5, kl_coefficient=kl_coefficient, reference=reference
    )
    before = parameters_of(actor)
    metrics = actor.train_step(message)
    assert set(metrics) == METRICS | ({"kl_reference"} if kl_coefficient else set())
    assert metrics["loss"] == pytest.approx(sum(losses) / mini_batches, rel=1e-4, abs=1e-6)
    assert largest_difference(before, parameters_of(actor)) >= 0.99e-5
    close = [
        (parameter - expected[name]).abs() < 1e-6 for name, parameter in parameters_of(actor).items()
    ]  # against updates of 1e-5
    assert torch.cat([mask.flatten() for mask in close]).float().mean() > 0.999


def test_gradient_equals_a_plain_implementation(make_actor, model_folder):
    actor = make_actor(max_tokens_per_micro_batch=60)
    message = random_step(seed=2)
    gradients = {}
    actor.optimizer.step = lambda: gradients.update(
        {name: parameter.grad.clone() for name, parameter in actor.model.named_parameters()}
    )
    metrics = actor.train_step(message)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    new = naive_logprobs(model, message)
    advantages = grpo_of(message)
    objective = sum(
        ((logprobs.detach() - engine).exp().clamp(max=2.0) * advantage * logprobs)[mask].sum()
        for logprobs, advantage, (_, _, mask, engine) in zip(new, advantages, trajectories(message), strict=True)
    )
    (-objective / int(message.loss_mask.sum())).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_update_does_not_depend_on_micro_batches(make_actor, fresh_accelerate):
    message = random_step(seed=6, groups=6, mini_batches=2)
    results = []
    for budget in (10_000, 120, 30):
        # SGD: rounding errors stay rounding errors.
        actor = make_actor(max_tokens_per_micro_batch=budget)
        actor.optimizer = torch.optim.SGD(actor.parameters, lr=1.0)
        metrics = actor.train_step(message)
        results.append((parameters_of(actor), metrics))
    assert [metrics["micro_batches"] for _, metrics in results] == sorted({m["micro_batches"] for _, m in results})
    assert results[2][1]["micro_batches"] > 8
    first, first_metrics = results[0]
    for parameters, metrics in results[1:]:
        assert largest_difference(first, parameters) < 1e-6
        for name in METRICS - {"micro_batches", "padded_fraction", "forward_backward_s", "optimizer_s"}:
            assert metrics[name] == pytest.approx(first_metrics[name], rel=1e-4, abs=1e-6), name


def test_gradient_checkpointing_changes_nothing(make_actor):
    message = random_step(seed=6)
    results = []
    for gradient_checkpointing in (False, True):
        actor = make_actor(gradient_checkpointing=gradient_checkpointing)
        actor.optimizer = torch.optim.SGD(actor.parameters, lr=1.0)
        actor.train_step(message)
        results.append(parameters_of(actor))
    assert largest_difference(*results) < 1e-6


def test_rewarded_response_becomes_likelier(make_actor):
    prompt, good, bad = [10, 20, 30], [40, 50, 60], [70, 80, 90, 100]
    actor = make_actor(optimizer={"learning_rate": 3e-4})

    def message(step):
        engine = np.concatenate([logprobs.detach().numpy() for logprobs in naive_logprobs(actor.model, empty)])
        return dataclasses.replace(empty, step=step, engine_logprobs=engine)

    empty = TrainStep(
        order=1,
        step=1,
        part=0,
        mini_batches=1,
        publish_version=1,
        group_ids=np.array([5, 5], np.int64),
        rewards=np.array([1.0, 0.0], np.float32),
        prompt_lengths=np.array([3, 3], np.int32),
        response_lengths=np.array([3, 4], np.int32),
        token_ids=np.array([*prompt, *good, *prompt, *bad], np.int32),
        loss_mask=np.ones(7, np.uint8),
        engine_logprobs=np.zeros(7, np.float32),
        staleness=np.zeros(2, np.int32),
    )
    history = []
    for step in range(1, 6):
        with torch.no_grad():
            history.append([logprobs.sum().item() for logprobs in naive_logprobs(actor.model, empty)])
        metrics = actor.train_step(message(step))
        assert metrics["mismatch_kl"] < 1e-9
        assert metrics["ratio_max"] == 1.0
        assert metrics["reward_mean"] == 0.5
        assert metrics["trained_tokens"] == 13
        assert metrics["response_tokens"] == 7
    assert all(later[0] > earlier[0] + 0.1 for earlier, later in itertools.pairwise(history))
    assert all(later[1] < earlier[1] - 0.1 for earlier, later in itertools.pairwise(history))


def test_groups_of_equal_rewards_leave_the_policy_alone(make_actor):
    actor = make_actor()
    before = parameters_of(actor)
    message = random_step()
    metrics = actor.train_step(dataclasses.replace(message, rewards=np.ones_like(message.rewards)))
    assert metrics["grad_norm"] == 0
    assert largest_difference(before, parameters_of(actor)) == 0


def test_several_mini_batches_take_the_ratio_against_the_policy_before_the_step(make_actor):
    actor = make_actor(optimizer={"learning_rate": 1e-2})
    metrics = actor.train_step(random_step(mini_batches=4))
    assert metrics["ratio_max"] > 1.1
    assert metrics["clip_fraction_high"] + metrics["clip_fraction_low"] > 0


def test_mini_batch_without_loss_tokens_makes_no_update(make_actor):
    actor = make_actor()
    message = random_step()
    before = parameters_of(actor)
    actor.train_step(message)
    moved = parameters_of(actor)
    assert largest_difference(before, moved) > 0
    metrics = actor.train_step(dataclasses.replace(message, loss_mask=np.zeros_like(message.loss_mask)))
    assert largest_difference(moved, parameters_of(actor)) == 0  # not even by Adam's momentum
    assert metrics["loss"] == 0


def test_empty_response_is_trained_around(make_actor):
    message = random_step(lengths=(0, 3), masked=False, seed=8)
    assert (message.response_lengths == 0).any()
    metrics = make_actor(max_tokens_per_micro_batch=12).train_step(message)
    assert math.isfinite(metrics["loss"])


def test_learning_rate_follows_the_step(make_actor):
    actor = make_actor(steps=4, optimizer={"learning_rate": 1e-3, "schedule": "linear", "warmup_steps": 2})
    rates = [actor.train_step(random_step(step))["learning_rate"] for step in (1, 2, 3, 4)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])
    assert actor.optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)


def test_engine_logprobs_that_are_nan_stop_the_run(make_actor):
    actor = make_actor()
    before = parameters_of(actor)
    message = random_step(step=3)
    engine = np.full_like(message.engine_logprobs, np.nan)
    with pytest.raises(RunFailed, match="step 3: engine_logprobs is not finite"):
        actor.train_step(dataclasses.replace(message, engine_logprobs=engine))
    assert largest_difference(before, parameters_of(actor)) == 0


def test_loss_that_is_not_finite_is_not_applied(make_actor):
    actor = make_actor()
    actor.train_step(random_step(1))
    with torch.no_grad():
        actor.model.model.norm.weight[0] = math.nan
    before = parameters_of(actor)
    with pytest.raises(RunFailed, match=r"step 2: loss is not finite \(nan\)"):
        actor.train_step(random_step(2))
    assert all(
        torch.equal(parameter.nan_to_num(7.0), before[name].nan_to_num(7.0))
        for name, parameter in actor.model.named_parameters()
    )


def test_gradient_that_is_not_finite_is_not_applied(make_actor):
    actor = make_actor()
    before = parameters_of(actor)
    actor.model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(RunFailed, match=r"step 1: grad_norm is not finite"):
        actor.train_step(random_step(1))
    assert largest_difference(before, parameters_of(actor)) == 0


def test_bfloat16_keeps_float32_parameters(make_actor):
    message = random_step(seed=2)
    exact = make_actor()
    exact_metrics = exact.train_step(message)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    actor = make_actor(dtype="bfloat16")
    metrics = actor.train_step(message)
    assert all(parameter.dtype == torch.float32 for parameter in actor.model.parameters())
    assert metrics["loss"] != exact_metrics["loss"]
    assert metrics["loss"] == pytest.approx(exact_metrics["loss"], abs=0.05)
    assert "bfloat16 autocast" in actor.describe()


def test_kl_to_the_reference_grows_from_zero(make_actor):
    actor = make_actor(algorithm={"kl": {"coefficient": 0.01}})
    kls = [actor.train_step(random_step(step))["kl_reference"] for step in (1, 2, 3)]
    assert kls[0] == pytest.approx(0, abs=1e-9)
    assert kls[2] > kls[1] > 1e-6


def test_importance_correction_can_be_off(make_actor):
    metrics = make_actor(algorithm={"correction": {"method": "none"}}).train_step(random_step())
    assert "importance_cut_fraction" not in metrics


def test_other_number_of_ranks_than_configured(make_actor):
    with pytest.raises(UserError, match=r"trainer\.ranks: 2 in the config, but torchrun started 1"):
        make_actor(ranks=2)


def test_description_says_what_runs(make_actor):
    actor = make_actor(strategy="fsdp")
    assert "Qwen3ForCausalLM" in actor.describe()
    assert "float32, cpu, 1 rank" in actor.describe()  # nothing to shard

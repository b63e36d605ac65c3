"""From rewards to gradients where a group or a response is out of the ordinary: every advantage with every loss, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laminar.algorithms.advantages import dr_grpo, gae, grpo, reinforce_plus_plus, rloo
from laminar.algorithms.aggregation import token_weights
from laminar.algorithms.overlong import overlong_penalty
from laminar.algorithms.policy_losses import PolicyTokens, cispo, dapo, decoupled_ppo, gspo, ppo
from tests.algorithms.test_advantages import rewarded

LOSSES = (ppo, dapo, gspo, cispo, decoupled_ppo)

# A group of one; one whose rewards are equal; one with a single success, whose second response is empty.
REWARDS = [5.0, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0]
GROUPS = [0, 1, 1, 1, 2, 2, 2, 2]
LENGTHS = [2, 1, 3, 0, 1, 0, 2, 4]
TOKENS = np.repeat(np.arange(8), LENGTHS)  # the trajectory of each
# Of rewards 1, 0, 0, 0: unbiased standard deviation 1/2; the others' means are 0 and 1/3.
EXPECTED = {grpo: (0.75 / 0.500001, -0.25 / 0.500001), dr_grpo: (0.75, -0.25), rloo: (1.0, -1 / 3)}


def gradient(loss, advantages, weights):
    """Of the whole loss by the logprob of each token, float64 [T], at a policy that has not moved."""
    old = torch.linspace(-2.0, -0.5, len(TOKENS), dtype=torch.float64)
    logprobs = old.clone().requires_grad_()
    tokens = PolicyTokens(
        logprobs=logprobs,
        old_logprobs=old,
        engine_logprobs=old,
        advantages=torch.from_numpy(advantages),
        loss_mask=torch.ones(len(TOKENS), dtype=torch.bool),
        trajectories=torch.from_numpy(TOKENS),
    )
    (found,) = torch.autograd.grad((loss(tokens).values * torch.from_numpy(weights)).sum(), logprobs)
    return found.numpy()


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant"])
@pytest.mark.parametrize("advantage", [grpo, dr_grpo, rloo])
@pytest.mark.parametrize("loss", LOSSES)
def test_only_the_group_with_a_difference_has_a_gradient(loss, advantage, aggregation):
    lengths = np.array(LENGTHS)
    weights = token_weights(lengths, aggregation=aggregation, max_response_tokens=10)[TOKENS]
    found = gradient(loss, advantage(rewarded(REWARDS, GROUPS, lengths=LENGTHS))[TOKENS], weights)
    success, failure = EXPECTED[advantage]
    per_token = np.select([TOKENS == 4, TOKENS > 4], [success, failure], 0.0)
    by_hand = {"token": 1 / 13, "trajectory": 1 / (6 * lengths[TOKENS]), "constant": 1 / 60}[aggregation]
    np.testing.assert_allclose(found, -per_token * by_hand, rtol=1e-6, atol=0)  # exactly 0 where it is 0


@pytest.mark.parametrize("loss", LOSSES)
def test_without_any_difference_there_is_no_gradient(loss):
    batch = rewarded([1.0] * 8, GROUPS, lengths=LENGTHS, values=[1.0] * len(TOKENS))
    for advantages in (grpo(batch)[TOKENS], reinforce_plus_plus(batch), gae(batch)[0]):
        assert not gradient(loss, advantages, np.ones(len(TOKENS))).any()


def test_a_truncated_response_loses_by_its_length():
    # All are right; two were cut off at 100 tokens, one came into the last 20.
    lengths = np.array([100, 90, 40, 100])
    rewards = 1.0 + overlong_penalty(lengths, max_response_tokens=100, buffer_tokens=20)
    np.testing.assert_allclose(rewards, [0.0, 0.5, 1.0, 0.0])
    batch = rewarded(rewards, lengths=lengths)
    np.testing.assert_allclose(dr_grpo(batch), [-0.375, 0.125, 0.625, -0.375])
    np.testing.assert_allclose(rloo(batch), np.array([-0.375, 0.125, 0.625, -0.375]) * 4 / 3)
    std = (3 * (0.375**2 + 0.375**2 + 0.125**2 + 0.625**2) / 9) ** 0.5
    np.testing.assert_allclose(grpo(batch, epsilon=0.0), np.array([-0.375, 0.125, 0.625, -0.375]) / std)


def test_a_response_that_was_cut_off_in_an_observation_earns_at_its_last_own_token():
    batch = rewarded([1.0], lengths=[5], mask=[1, 1, 0, 0, 0], values=[0.25, 0.5, 9.0, 9.0, 9.0])
    advantages, returns = gae(batch, gamma=0.5, gae_lambda=0.5)
    last = 1.0 - 0.5  # nothing is to come behind it
    first = 0.5 * 0.5 - 0.25 + 0.25 * last
    np.testing.assert_allclose(advantages, [first, last, 0, 0, 0])
    np.testing.assert_allclose(returns, [first + 0.25, 1.0, 0, 0, 0])
    spread = reinforce_plus_plus(batch, gamma=0.5)  # 0.5 and 1: less their mean, over their deviation of 0.25 * sqrt(2)
    np.testing.assert_allclose(spread, [-(0.5**0.5), 0.5**0.5, 0, 0, 0], rtol=1e-5)

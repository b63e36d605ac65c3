from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from laminar.algorithms.advantages import (
    RewardedBatch,
    check_rewards,
    dr_grpo,
    gae,
    grpo,
    normalized,
    reinforce_plus_plus,
    rloo,
)

GROUP_ADVANTAGES = (grpo, dr_grpo, rloo)


def rewarded(rewards, group_ids=None, *, lengths=None, mask=None, token_rewards=None, values=None):
    """A batch; without more said one group of responses of two tokens."""
    lengths = np.array([2] * len(rewards) if lengths is None else lengths, np.int64)
    total = int(lengths.sum())
    return RewardedBatch(
        rewards=np.array(rewards, np.float64),
        group_ids=np.zeros(len(rewards), np.int64) if group_ids is None else np.array(group_ids),
        response_lengths=lengths,
        loss_mask=np.ones(total, bool) if mask is None else np.array(mask, bool),
        token_rewards=np.zeros(total) if token_rewards is None else np.array(token_rewards, np.float64),
        values=None if values is None else np.array(values, np.float64),
    )


def random_batch(seed, groups=5, size=8, values=False):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 7, groups * size)
    lengths[:2] = [0, 1]
    total = int(lengths.sum())
    mask = random.random(total) < 0.8
    return rewarded(
        random.normal(size=groups * size),
        np.repeat(np.arange(groups), size)[random.permutation(groups * size)],
        lengths=lengths,
        mask=mask,
        token_rewards=np.where(mask, 0.1 * random.normal(size=total), 0.0),
        values=np.where(mask, random.normal(size=total), np.nan) if values else None,
    )


# By hand


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Rewards 1, 0, 0, 0: mean 1/4; unbiased variance (9/16 + 3/16) / 3 = 1/4, standard deviation 1/2.
        (lambda batch: grpo(batch, epsilon=0.0), [1.5, -0.5, -0.5, -0.5]),
        (grpo, [0.75 / 0.500001, -0.25 / 0.500001, -0.25 / 0.500001, -0.25 / 0.500001]),
        (dr_grpo, [0.75, -0.25, -0.25, -0.25]),
        # The others' means: 0 for the one that is right, 1/3 for each of the wrong ones.
        (rloo, [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_success_of_four(advantage, expected):
    np.testing.assert_allclose(advantage(rewarded([1.0, 0, 0, 0])), expected, rtol=1e-12)


def test_group_of_two():
    batch = rewarded([3.0, 1.0], [7, 7])
    np.testing.assert_allclose(grpo(batch, epsilon=0.0), [0.5**0.5, -(0.5**0.5)], rtol=1e-12)
    np.testing.assert_array_equal(dr_grpo(batch), [1.0, -1.0])
    np.testing.assert_array_equal(rloo(batch), [2.0, -2.0])


@pytest.mark.parametrize("advantage", GROUP_ADVANTAGES)
def test_groups_of_one_and_equal_groups_are_exactly_zero(advantage):
    # The mean of three times 0.1 is not 0.1: a spread tested against 0 would let rounding noise through.
    rewards = np.array([5.0, 0.1, 0.1, 0.1, -1e20, -1e20])
    assert rewards[1:4].mean() != 0.1
    np.testing.assert_array_equal(advantage(rewarded(rewards, [0, 1, 1, 1, 2, 2])), np.zeros(6))


@pytest.mark.parametrize("advantage", GROUP_ADVANTAGES)
def test_what_tokens_earn_counts_for_their_trajectory(advantage):
    # Rewards 1, 1 less KL penalties of 0.5 and 0, one of them of an empty response.
    batch = rewarded([1.0, 1.0, 1.0], lengths=[2, 0, 1], token_rewards=[-0.25, -0.25, 0.0])
    np.testing.assert_allclose(advantage(batch), advantage(rewarded([0.5, 1.0, 1.0])), rtol=1e-12)
    assert advantage(batch)[0] < 0


@pytest.mark.parametrize("advantage", GROUP_ADVANTAGES)
def test_interleaved_groups_keep_their_order_and_do_not_touch_each_other(advantage):
    rewards = np.array([1.0, 10.0, 0.0, 30.0, 0.0, 20.0, 0.0])
    ids = np.array(["b", "a", "b", "a", "b", "a", "b"])
    advantages = advantage(rewarded(rewards, ids))
    for group in "ab":
        np.testing.assert_allclose(advantages[ids == group], advantage(rewarded(rewards[ids == group])))
    # A group that comes short of a member shifts nobody else's.
    short = advantage(rewarded(rewards[:-1], ids[:-1]))
    np.testing.assert_array_equal(short[[1, 3, 5]], advantages[[1, 3, 5]])


def test_reinforce_plus_plus_by_hand():
    # Two responses, of two tokens and of one; 1 and 0 earned at the end, penalties of 0.5 at the first tokens.
    batch = rewarded([1.0, 0.0], [0, 1], lengths=[2, 1], token_rewards=[-0.5, 0.0, -0.5])
    to_come = np.array([0.5, 1.0, -0.5])  # mean 1/3, unbiased variance (1/36 + 16/36 + 25/36) / 2 = 7/12
    expected = (to_come - 1 / 3) / ((7 / 12) ** 0.5 + 1e-6)
    np.testing.assert_allclose(reinforce_plus_plus(batch), expected, rtol=1e-12)
    # Discounted by a half: 0 - 0.5 + 0.5 * 1, 1, -0.5.
    discounted = np.array([0.0, 1.0, -0.5])
    expected = (discounted - discounted.mean()) / (discounted.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(reinforce_plus_plus(batch, gamma=0.5), expected, rtol=1e-12)


def test_reinforce_plus_plus_passes_over_observations_and_empty_responses():
    batch = rewarded([1.0, 5.0, 0.0], [0, 0, 1], lengths=[3, 0, 2], mask=[1, 0, 1, 0, 1])
    advantages = reinforce_plus_plus(batch)
    assert advantages[1] == advantages[3] == 0
    one, zero = 1 / 3, -2 / 3  # of 1, 1, 0
    std = (2 / 3 / 2) ** 0.5 + 1e-6
    np.testing.assert_allclose(advantages[[0, 2, 4]], [one / std, one / std, zero / std], rtol=1e-12)
    np.testing.assert_array_equal(reinforce_plus_plus(rewarded([2.0], [0])), [0, 0])


def test_gae_by_hand():
    # Values 0.5, 0.2; reward 1 at the end; gamma 0.9, lambda 0.5.
    batch = rewarded([1.0], lengths=[2], values=[0.5, 0.2])
    last = 1.0 - 0.2
    first = 0.9 * 0.2 - 0.5 + 0.9 * 0.5 * last
    advantages, returns = gae(batch, gamma=0.9, gae_lambda=0.5)
    np.testing.assert_allclose(advantages, [first, last], rtol=1e-12)
    np.testing.assert_allclose(returns, [first + 0.5, last + 0.2], rtol=1e-12)
    # With lambda 1 the return is what is earned, whatever the critic says; with 0 one step is looked ahead.
    np.testing.assert_allclose(gae(batch)[1], [1.0, 1.0], rtol=1e-12)
    np.testing.assert_allclose(gae(batch, gae_lambda=0.0)[0], [0.2 - 0.5, 0.8], rtol=1e-12)


def test_gae_passes_over_observations_and_empty_responses():
    nan = float("nan")
    batch = rewarded([1.0, 3.0, 2.0], lengths=[3, 0, 1], mask=[1, 0, 1, 1], values=[0.5, nan, 0.2, 1.5])
    advantages, returns = gae(batch, gamma=0.9, gae_lambda=0.5)
    alone, _ = gae(rewarded([1.0], lengths=[2], values=[0.5, 0.2]), gamma=0.9, gae_lambda=0.5)
    np.testing.assert_allclose(advantages, [alone[0], 0.0, alone[1], 0.5], rtol=1e-12)
    assert returns[1] == 0


def test_gae_without_values_is_refused():
    with pytest.raises(ValueError, match="critic"):
        gae(rewarded([1.0]))


def test_normalized_by_hand():
    mask = np.array([True, True, False])
    np.testing.assert_allclose(
        normalized(np.array([1.0, 3.0, 99.0]), mask), np.array([-1, 1, 0]) / (2**0.5 + 1e-6), rtol=1e-12
    )
    np.testing.assert_array_equal(normalized(np.array([0.1, 0.1, 5.0]), mask), [0, 0, 0])
    np.testing.assert_array_equal(normalized(np.array([4.0, 0, 0]), np.zeros(3, bool)), [0, 0, 0])


# Published formulas, written down anew


@pytest.mark.parametrize("seed", range(5))
def test_group_advantages_are_verls(seed):
    batch = random_batch(seed)
    ends = np.cumsum(batch.response_lengths)
    scores = [
        reward + batch.token_rewards[end - length : end].sum()
        for reward, end, length in zip(batch.rewards, ends, batch.response_lengths, strict=True)
    ]
    for index, score in enumerate(scores):
        own = torch.tensor([s for s, g in zip(scores, batch.group_ids, strict=True) if g == batch.group_ids[index]])
        count = len(own)
        assert grpo(batch)[index] == pytest.approx(((score - own.mean()) / (own.std() + 1e-6)).item(), abs=1e-6)
        assert dr_grpo(batch)[index] == pytest.approx((score - own.mean()).item(), abs=1e-6)
        baseline = score * count / (count - 1) - own.mean() * count / (count - 1)
        assert rloo(batch)[index] == pytest.approx(baseline.item(), abs=1e-6)


def padded(batch, flat):
    """[B, longest] of an array [T], zeros behind each response."""
    result = torch.zeros(len(batch.rewards), int(batch.response_lengths.max()), dtype=torch.float64)
    start = 0
    for row, length in enumerate(batch.response_lengths):
        result[row, :length] = torch.tensor(np.nan_to_num(flat[start : start + length]), dtype=torch.float64)
        start += length
    return result


def token_level(batch):
    """(rewards, mask), both [B, longest]: a trajectory's reward stands at its last loss token."""
    mask = padded(batch, batch.loss_mask.astype(float))
    rewards = padded(batch, batch.token_rewards)
    for row in range(len(rewards)):
        if mask[row].any():
            rewards[row, mask[row].nonzero()[-1]] += batch.rewards[row]
    return rewards, mask


def whiten(values, mask):
    mean = (values * mask).sum() / mask.sum()
    variance = (((values - mean) ** 2) * mask).sum() / (mask.sum() - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def assert_same(batch, flat, expected):
    torch.testing.assert_close(padded(batch, flat), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_reinforce_plus_plus_is_verls(seed, gamma):
    batch = random_batch(seed)
    rewards, mask = token_level(batch)
    returns = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        # Over an observation the sum is carried on, undiscounted.
        running = torch.where(mask[:, t] > 0, rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    assert_same(batch, reinforce_plus_plus(batch, gamma=gamma), whiten(returns, mask))


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.95, 0.9), (1.0, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_verls(seed, gamma, gae_lambda):
    batch = random_batch(seed, values=True)
    rewards, mask = token_level(batch)
    values = padded(batch, batch.values)
    advantages = torch.zeros_like(rewards)
    following = last = torch.zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = delta + gamma * gae_lambda * last
        following = values[:, t] * mask[:, t] + (1 - mask[:, t]) * following
        last = advantage * mask[:, t] + (1 - mask[:, t]) * last
        advantages[:, t] = last
    ours, returns = gae(batch, gamma=gamma, gae_lambda=gae_lambda)
    assert_same(batch, ours, advantages * mask)
    assert_same(batch, returns, (advantages + values) * mask)
    assert_same(batch, normalized(ours, batch.loss_mask), whiten(advantages, mask))


def test_group_advantages_are_independent_of_shift_and_order():
    for seed in range(20):
        batch = random_batch(seed)
        for advantage in GROUP_ADVANTAGES:
            advantages = advantage(batch)
            for group in np.unique(batch.group_ids):
                assert abs(advantages[batch.group_ids == group].sum()) < 1e-9
            shifted = rewarded(batch.returns() + 100, batch.group_ids)
            np.testing.assert_allclose(advantage(shifted), advantages, atol=1e-6)


# Bad input


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_reward_is_refused_by_index(bad):
    with pytest.raises(ValueError, match=r"not finite: rewards\[2\] = .*group 4"):
        check_rewards(np.array([1.0, 0.0, bad]), np.array([4, 4, 4]))


def test_reward_that_overflows_is_refused_by_index():
    with pytest.raises(ValueError, match=r"too large .*: rewards\[1\] = 1e\+38"):
        check_rewards(np.array([0.0, 1e38, -1e38]), np.array([0, 1, 1]))


@pytest.mark.parametrize("advantage", [*GROUP_ADVANTAGES, reinforce_plus_plus])
def test_no_trajectories_give_no_advantages(advantage):
    assert advantage(rewarded([])).shape == (0,)


def test_what_needs_no_torch_imports_none():
    modules = "advantages, laminar.algorithms.aggregation, laminar.algorithms.batching, laminar.algorithms.overlong"
    code = f"import sys, laminar.algorithms.{modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

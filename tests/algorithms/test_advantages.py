from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from laminar.algorithms.advantages import group_advantages


def test_one_right_of_four_by_hand():
    # Mean 1/4; unbiased variance (9/16 + 3/16) / 3 = 1/4, so the standard deviation is 1/2.
    advantages = group_advantages(np.array([1.0, 0, 0, 0]), np.zeros(4, dtype=int), epsilon=0.0)
    assert advantages.dtype == np.float32
    np.testing.assert_array_equal(advantages, [1.5, -0.5, -0.5, -0.5])


def test_one_right_of_four_with_the_default_epsilon():
    advantages = group_advantages(np.array([1.0, 0, 0, 0]), np.zeros(4, dtype=int))
    np.testing.assert_allclose(advantages, np.array([0.75, -0.25, -0.25, -0.25]) / 0.500001, rtol=1e-6)


def test_without_the_division_by_the_standard_deviation():
    advantages = group_advantages(np.array([1.0, 0, 0, 0]), np.zeros(4, dtype=int), normalize_std=False)
    np.testing.assert_array_equal(advantages, [0.75, -0.25, -0.25, -0.25])


def test_group_of_two_by_hand():
    # Mean 2, unbiased standard deviation sqrt(2).
    advantages = group_advantages(np.array([3.0, 1.0]), np.array([7, 7]), epsilon=0.0)
    np.testing.assert_allclose(advantages, [0.5**0.5, -(0.5**0.5)], rtol=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_groups_of_one_and_constant_groups_are_exactly_zero(normalize_std):
    # The mean of three times 0.1 is not 0.1: a spread tested against 0 would let rounding noise through.
    rewards = np.array([5.0, 0.1, 0.1, 0.1, -1e30, -1e30])
    assert rewards[1:4].mean() != 0.1
    advantages = group_advantages(rewards, np.array([0, 1, 1, 1, 2, 2]), normalize_std=normalize_std)
    np.testing.assert_array_equal(advantages, np.zeros(6))


def test_interleaved_groups_keep_their_order_and_do_not_touch_each_other():
    rewards = np.array([1.0, 10.0, 0.0, 30.0, 0.0, 20.0, 0.0])
    ids = np.array(["b", "a", "b", "a", "b", "a", "b"])
    advantages = group_advantages(rewards, ids, epsilon=0.0)
    np.testing.assert_allclose(advantages, [1.5, -1.0, -0.5, 1.0, -0.5, 0.0, -0.5], atol=1e-7)
    # A group that comes short of a member shifts nobody else's.
    np.testing.assert_array_equal(
        group_advantages(rewards[:-1], ids[:-1], epsilon=0.0)[[1, 3, 5]], advantages[[1, 3, 5]]
    )


def test_random_groups_are_centred_scaled_and_independent_of_shift_and_order():
    random = np.random.default_rng(0)
    for _ in range(50):
        ids = random.integers(0, 6, size=40) * 1000
        rewards = random.normal(size=40)
        advantages = group_advantages(rewards, ids)
        for group in np.unique(ids):
            own = advantages[ids == group].astype(np.float64)
            assert abs(own.sum()) < 1e-5
            if len(own) > 1:
                assert abs(own.std(ddof=1) - 1) < 1e-4
        shuffle = random.permutation(40)
        np.testing.assert_allclose(group_advantages(rewards[shuffle], ids[shuffle]), advantages[shuffle], atol=1e-6)
        np.testing.assert_allclose(group_advantages(rewards + 100, ids), advantages, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_reward_is_refused_by_index(bad):
    with pytest.raises(ValueError, match=r"not finite: rewards\[2\] = .*group 4"):
        group_advantages(np.array([1.0, 0.0, bad]), np.array([4, 4, 4]))


def test_reward_that_overflows_is_refused_by_index():
    with pytest.raises(ValueError, match=r"too large .*: rewards\[1\] = 1e\+308"):
        group_advantages(np.array([0.0, 1e308, -1e308]), np.array([0, 1, 1]), normalize_std=False)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"rewards \(3,\) and group_ids \(2,\)"):
        group_advantages(np.zeros(3), np.zeros(2, dtype=int))


def test_no_trajectories_give_no_advantages():
    assert group_advantages(np.array([]), np.array([], dtype=int)).shape == (0,)


def test_advantages_and_batching_import_no_torch():
    code = "import sys, laminar.algorithms.advantages, laminar.algorithms.batching; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

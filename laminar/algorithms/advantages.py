"""Advantages. Invariant: without a global normalization, a trajectory's advantages depend on its own group and nothing else.

Numpy only, so that a process without torch can compute them too. Group-relative advantages are one number per trajectory,
the others one per response token. A group whose returns are all equal, a group of one included, has nothing to compare:
its group-relative advantages are exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EPSILON = 1e-6  # added to standard deviations


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardedBatch:
    """B trajectories with what they earned; their T response tokens stand one after the other, in their order."""

    rewards: Floats  # float64 [B]: of the whole trajectory, earned at its last loss token
    group_ids: NDArray[np.int64]  # int64 [B], in any order
    response_lengths: NDArray[np.int64]  # int64 [B], with sum T; 0 for an empty response
    loss_mask: NDArray[np.bool_]  # bool [T]: tokens that the policy generated; the others are observations
    token_rewards: Floats  # float64 [T]: earned at each token beside that, such as a KL penalty; 0 outside of the mask
    values: Floats | None = None  # float64 [T]: the critic's estimate before each token

    def returns(self) -> Floats:
        """All that each trajectory earned, float64 [B]."""
        return self.rewards + np.bincount(self.trajectory_of(), self.token_rewards, minlength=len(self.rewards))

    def trajectory_of(self) -> NDArray[np.int64]:
        """The trajectory of each response token, int64 [T]."""
        return np.repeat(np.arange(len(self.rewards)), self.response_lengths)

    def loss_tokens(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(trajectory, where its loss tokens lie in arrays of length T, int64 [L]) of those that have any."""
        ends = np.cumsum(self.response_lengths)
        for index, (end, length) in enumerate(zip(ends, self.response_lengths, strict=True)):
            places = np.flatnonzero(self.loss_mask[end - length : end]) + (end - length)
            if len(places):
                yield index, places


def grpo(batch: RewardedBatch, *, epsilon: float = EPSILON) -> Floats:  # float64 [B]
    """`(r - mean) / (std + epsilon)` within the group, with the unbiased standard deviation, as in verl and TRL.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300) section 4.1.2.
    """
    return _within_groups(batch, lambda own: (own - own.mean()) / (own.std(ddof=1) + epsilon))


def dr_grpo(batch: RewardedBatch) -> Floats:  # float64 [B]
    """`r - mean` within the group: dividing would weigh up groups that are nearly all right or nearly all wrong.

    Source: Dr. GRPO (arXiv 2503.20783) section 3. Its loss goes with aggregation `constant`.
    """
    return _within_groups(batch, lambda own: own - own.mean())


def rloo(batch: RewardedBatch) -> Floats:  # float64 [B]
    """`r` minus the mean of the other members of the group.

    Source: RLOO, Ahmadian et al. 2024 (arXiv 2402.14740) section 3.2.
    """
    return _within_groups(batch, lambda own: (own - own.mean()) * len(own) / (len(own) - 1))


def reinforce_plus_plus(batch: RewardedBatch, *, gamma: float = 1.0) -> Floats:  # float64 [T]
    """What is still to be earned from each token on, normalized over all loss tokens of the batch; no group needed.

    Source: REINFORCE++ (arXiv 2501.03262) section 3.
    """
    advantages = np.zeros(len(batch.loss_mask))
    for index, places in batch.loss_tokens():
        earned = batch.token_rewards[places].copy()
        earned[-1] += batch.rewards[index]
        advantages[places] = _discounted_sums(earned, gamma)
    return normalized(advantages, batch.loss_mask)


def gae(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> tuple[Floats, Floats]:
    """(advantages, returns that the critic learns), both float64 [T]; advantages are not normalized yet.

    `A_t = d_t + gamma * lambda * A_(t+1)` with `d_t = r_t + gamma * V_(t+1) - V_t`, and V after the last token 0: an answer
    that was cut short counts as ended. The steps are the loss tokens: observations between them are passed over.

    Source: Schulman et al. 2015 (arXiv 1506.02438) equation 16; PPO (arXiv 1707.06347) equation 11.

    Raises ValueError for a batch without values.
    """
    if batch.values is None:
        raise ValueError("gae needs the critic's values")
    advantages = np.zeros(len(batch.loss_mask))
    returns = np.zeros(len(batch.loss_mask))
    for index, places in batch.loss_tokens():
        earned = batch.token_rewards[places].copy()
        earned[-1] += batch.rewards[index]
        values = batch.values[places]
        differences = earned + gamma * np.append(values[1:], 0.0) - values
        advantages[places] = _discounted_sums(differences, gamma * gae_lambda)
        returns[places] = advantages[places] + values
    return advantages, returns


def normalized(advantages: Floats, loss_mask: NDArray[np.bool_]) -> Floats:  # both [T]
    """Mean 0 and standard deviation 1 (unbiased) over the loss tokens, 0 elsewhere; all 0 where they are all equal."""
    result = np.zeros(len(advantages))
    own = advantages[loss_mask]
    if len(own) and own.min() != own.max():
        result[loss_mask] = (own - own.mean()) / (own.std(ddof=1) + EPSILON)
    return result


def check_rewards(rewards: Floats, group_ids: NDArray[np.int64]) -> None:
    """Raise ValueError, naming its index, for a reward that is not finite, or too large for advantages in float32."""
    for bad, problem in (
        (~np.isfinite(rewards), "reward is not finite"),
        (np.abs(rewards) > 1e30, "reward is too large for a float32 advantage"),
    ):
        if bad.any():
            index = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"{problem}: rewards[{index}] = {rewards[index]} (group {group_ids[index]}; {int(bad.sum())} such)"
            )


def _within_groups(batch: RewardedBatch, formula: Callable[[Floats], Floats]) -> Floats:
    returns = batch.returns()
    advantages = np.zeros(len(returns))
    _, group_of = np.unique(batch.group_ids, return_inverse=True)  # int [B]: dense group index
    for members in np.split(np.argsort(group_of, kind="stable"), np.cumsum(np.bincount(group_of))[:-1]):
        own = returns[members]
        # The mean of equal floats can differ from them in the last bit, so equality is tested, not the spread.
        if len(own) and own.min() != own.max():
            advantages[members] = formula(own)
    return advantages


def _discounted_sums(values: Floats, factor: float) -> Floats:
    """`s_t = v_t + factor * s_(t+1)`."""
    if factor == 1.0:
        return np.cumsum(values[::-1])[::-1]
    sums = values.copy()
    for index in range(len(values) - 2, -1, -1):
        sums[index] += factor * sums[index + 1]
    return sums

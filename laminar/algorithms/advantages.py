"""Group-relative advantages (GRPO). Invariant: a trajectory's advantage depends on its own group and on nothing else.

Numpy only, so that a process without torch can compute them too.
"""

from __future__ import annotations

import numpy as np


def group_advantages(
    rewards: np.ndarray,  # float [N]
    group_ids: np.ndarray,  # int or str [N], in any order
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> np.ndarray:  # float32 [N]
    """Advantage of every trajectory within its group: `(r - mean) / (std + epsilon)`, in the order of `rewards`.

    The standard deviation is the unbiased one (ddof 1), as in verl and TRL. `normalize_std=False` leaves the division
    out (Dr. GRPO: the division weighs up groups that are nearly all right or nearly all wrong).
    A group whose rewards are all equal, a group of one included, has nothing to compare: exactly 0 for each member.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300) section 4.1.2; Dr. GRPO (arXiv 2503.20783) section 3.

    Raises ValueError when a reward is not finite or too large (the message names its index), or when shapes differ.
    """
    values = np.asarray(rewards, dtype=np.float64)
    groups = np.asarray(group_ids)
    if values.ndim != 1 or groups.shape != values.shape:
        raise ValueError(f"rewards {values.shape} and group_ids {groups.shape} must both have shape [N]")
    _refuse_non_finite(values, groups, values, "reward is not finite")

    advantages = np.zeros(len(values), dtype=np.float64)
    _, group_of = np.unique(groups, return_inverse=True)  # int [N]: dense group index
    members_by_group = np.split(np.argsort(group_of, kind="stable"), np.cumsum(np.bincount(group_of))[:-1])
    with np.errstate(over="ignore", invalid="ignore"):
        for members in members_by_group:
            own = values[members]
            # The mean of equal floats can differ from them in the last bit, so equality is tested, not the spread.
            if len(own) == 0 or own.min() == own.max():
                continue
            centred = own - own.mean()
            advantages[members] = centred / (own.std(ddof=1) + epsilon) if normalize_std else centred
        result = advantages.astype(np.float32)
    _refuse_non_finite(result, groups, values, "reward is too large for a float32 advantage")
    return result


def _refuse_non_finite(checked: np.ndarray, groups: np.ndarray, rewards: np.ndarray, problem: str) -> None:
    """Raise ValueError naming the first index at which `checked` is not finite."""
    bad = np.flatnonzero(~np.isfinite(checked))
    if len(bad):
        index = int(bad[0])
        raise ValueError(f"{problem}: rewards[{index}] = {rewards[index]} (group {groups[index]}; {len(bad)} such)")

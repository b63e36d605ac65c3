"""Trajectories in progress, with every token that their rollouts have sent.

Invariants: tokens are taken in only under the current lease and from the trajectory's own policy version; a trajectory
is in the pool from its start until it has finished.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from laminar.errors import RunFailed
from laminar.trajectory import Trajectory, TrajectoryState


class PartialResponsePool:
    """Leases trajectories to rollouts and takes in their deltas."""

    def __init__(self) -> None:
        self.late_tokens = 0  # dropped because their lease was old
        self._trajectories: dict[str, Trajectory] = {}

    def __len__(self) -> int:
        return len(self._trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self._trajectories.values())

    def get(self, trajectory_id: str) -> Trajectory | None:
        """A trajectory in progress."""
        return self._trajectories.get(trajectory_id)

    def lease(self, trajectory: Trajectory, *, rollout: str, policy_version: int, now: float) -> None:
        """Assign a trajectory to a rollout; its version is fixed by the first lease."""
        if trajectory.policy_version is None:
            trajectory.policy_version = policy_version
            trajectory.started_at = now
        elif trajectory.policy_version != policy_version:
            raise RuntimeError(
                f"trajectory {trajectory.trajectory_id} of version {trajectory.policy_version} leased to {rollout}, "
                f"which serves version {policy_version}"
            )
        trajectory.move_to(TrajectoryState.GENERATING)
        trajectory.lease += 1
        trajectory.rollout = rollout
        self._trajectories[trajectory.trajectory_id] = trajectory

    def take_in(
        self,
        trajectory_id: str,
        *,
        lease: int,
        policy_version: int,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        finish_reason: str | None,
        now: float,
    ) -> Trajectory | None:
        """Take in one delta ([D] token ids and logprobs); returns the trajectory if this finished it.

        Raises:
            RunFailed: the rollout generated with another version than the trajectory's, or a logprob is not finite.
        """
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None or trajectory.lease != lease:
            self.late_tokens += int(token_ids.shape[0])
            return None
        if policy_version != trajectory.policy_version:
            raise RunFailed(
                f"{trajectory.rollout} generated tokens of trajectory {trajectory_id} with version {policy_version}; "
                f"it belongs to version {trajectory.policy_version}"
            )
        if not np.isfinite(logprobs).all():
            raise RunFailed(f"{trajectory.rollout} sent a logprob that is not finite for trajectory {trajectory_id}")
        trajectory.append(token_ids, logprobs)
        if finish_reason is None:
            return None
        trajectory.finish_reason = finish_reason
        trajectory.finished_at = now
        trajectory.move_to(TrajectoryState.FINISHED)
        del self._trajectories[trajectory_id]
        return trajectory

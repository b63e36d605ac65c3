"""Trajectories in progress, with every token that their rollouts have sent.

Invariants: tokens are taken in only under the current lease, in order, each once, and from the version that the lease
names; a trajectory is in the pool from its start until it has finished or was withdrawn; one that no rollout holds is
either an orphan (any rollout of its version may go on with it), destined for one rollout, or in an environment's hands,
from which it comes back to the rollout that had it, if that is still there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from laminar.errors import RunFailed
from laminar.protocol.messages import TrajectoryDeltas
from laminar.trajectory import Trajectory, TrajectoryState


class PartialResponsePool:
    """Leases trajectories to rollouts, takes in their deltas, and keeps those whose rollout is gone."""

    def __init__(self, *, mixes_versions: bool = False, multi_turn: bool = False, first_lease: int = 1) -> None:
        """
        Args:
            mixes_versions: a trajectory may go on with another version than it started with (schedule `partial`).
            multi_turn: an environment answers what ends with finish reason "stop".
            first_lease: higher than all that earlier controllers of this run have given.
        """
        self.late_tokens = 0  # dropped: their lease was old, or they had been taken in already
        self.orphans: dict[str, Trajectory] = {}
        self._mixes_versions = mixes_versions
        self._multi_turn = multi_turn
        self._trajectories: dict[str, Trajectory] = {}
        self._destined: dict[str, dict[str, Trajectory]] = {}  # by rollout
        self._in_environment: dict[str, dict[str, Trajectory]] = {}  # by the rollout that they come back to
        self._first_lease = first_lease

    def __len__(self) -> int:
        return len(self._trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self._trajectories.values())

    @property
    def held(self) -> int:
        """Trajectories that a rollout holds at the moment, or that an environment has and gives back to it."""
        return len(self._trajectories) - len(self.orphans) - sum(len(waiting) for waiting in self._destined.values())

    def get(self, trajectory_id: str) -> Trajectory | None:
        """A trajectory in progress."""
        return self._trajectories.get(trajectory_id)

    def lease(self, trajectory: Trajectory, *, rollout: str, policy_version: int, now: float) -> None:
        """Assign a trajectory to a rollout; its version is fixed by the first lease."""
        if trajectory.started_at is None:
            trajectory.started_at = now
        if not trajectory.versions:
            trajectory.policy_version = policy_version
        elif trajectory.policy_version != policy_version and not self._mixes_versions:
            raise RuntimeError(
                f"trajectory {trajectory.trajectory_id} of version {trajectory.policy_version} leased to {rollout}, "
                f"which serves version {policy_version}"
            )
        if not trajectory.versions or trajectory.versions[-1][0] != policy_version:
            trajectory.versions.append((policy_version, trajectory.num_tokens))
        trajectory.move_to(TrajectoryState.GENERATING)
        trajectory.lease = max(trajectory.lease + 1, self._first_lease)
        trajectory.rollout = rollout
        self._trajectories[trajectory.trajectory_id] = trajectory

    def take_in(self, message: TrajectoryDeltas, now: float) -> list[Trajectory]:
        """Take in the deltas of one message; returns the trajectories that they ended, in the order of the message.

        Each is FINISHED; or still GENERATING when its rollout stopped it (finish reason "abort"); or it has ended a turn and is
        in an environment's hands (ENVIRONMENT).

        Raises:
            RunFailed: the rollout generated with another version than it was leased for, left tokens out, or a logprob
                is not finite.
        """
        trajectories, generating = self._trajectories, TrajectoryState.GENERATING
        token_ids, logprobs = message.token_ids, message.logprobs
        finite = bool(
            np.isfinite(logprobs).all()
        )  # once for all: a call of numpy's costs more than the rest of a delta
        ended: list[Trajectory] = []
        end = 0
        for trajectory_id, lease, start, count, finish_reason in zip(
            message.trajectory_ids,
            message.leases,
            message.starts.tolist(),
            message.token_counts.tolist(),
            message.finish_reasons,
            strict=True,
        ):
            begin, end = end, end + count
            trajectory = trajectories.get(trajectory_id)
            if trajectory is None or trajectory.lease != lease or trajectory.state is not generating:
                self.late_tokens += count
                continue
            known = trajectory.num_tokens - start
            if known > 0:  # sent again: by a network, or to a controller that took another's place
                self.late_tokens += min(known, count)
                if known > count or (known == count and finish_reason is None):
                    continue
                start, begin = trajectory.num_tokens, begin + known
            if start > trajectory.num_tokens or message.policy_version != trajectory.versions[-1][0]:
                raise RunFailed(_misfit(trajectory, start, message.policy_version))
            if not finite and not np.isfinite(logprobs[begin:end]).all():
                raise RunFailed(
                    f"{trajectory.rollout} sent a logprob that is not finite for trajectory {trajectory_id}"
                )
            trajectory.append(token_ids[begin:end], logprobs[begin:end])
            if finish_reason is not None:
                if finish_reason == "stop" and self._multi_turn:
                    self._end_turn(trajectory)
                elif finish_reason != "abort":
                    self.finish(trajectory, finish_reason, now)
                ended.append(trajectory)
        return ended

    def finish(self, trajectory: Trajectory, finish_reason: str, now: float) -> None:
        """All tokens are there."""
        trajectory.complete()
        trajectory.finish_reason = finish_reason
        trajectory.finished_at = now
        trajectory.move_to(TrajectoryState.FINISHED)
        self.withdraw(trajectory)

    def _end_turn(self, trajectory: Trajectory) -> None:
        trajectory.move_to(TrajectoryState.ENVIRONMENT)
        self._in_environment.setdefault(trajectory.rollout or "", {})[trajectory.trajectory_id] = trajectory

    def in_environment(self, rollout: str) -> list[Trajectory]:
        """Trajectories that come back to this rollout from an environment."""
        return list(self._in_environment.get(rollout, {}).values())

    def rehome(self, trajectory: Trajectory, rollout: str) -> None:
        """It comes back from the environment to this rollout instead; "": to none, as an orphan."""
        self._undestine(trajectory)
        trajectory.rollout = rollout or None
        self._in_environment.setdefault(rollout, {})[trajectory.trajectory_id] = trajectory

    def take_back(self, trajectory: Trajectory) -> None:
        """One that an earlier controller knew: on its rollout, if that comes back, or an orphan."""
        self._trajectories[trajectory.trajectory_id] = trajectory
        if trajectory.state is TrajectoryState.ORPHANED:
            self.orphans[trajectory.trajectory_id] = trajectory
        elif (
            trajectory.state is TrajectoryState.ENVIRONMENT
        ):  # it comes back to nobody, unless its rollout comes back first
            self._in_environment.setdefault("", {})[trajectory.trajectory_id] = trajectory

    def orphan(self, trajectory: Trajectory) -> None:
        """Its rollout is gone: whoever serves its version may go on with it."""
        self._undestine(trajectory)
        trajectory.move_to(TrajectoryState.ORPHANED)
        trajectory.rollout = None
        self.orphans[trajectory.trajectory_id] = trajectory

    def destine(self, trajectory: Trajectory, rollout: str) -> None:
        """It was stopped, or has come back from an environment, to go on at this rollout."""
        self._undestine(trajectory)
        trajectory.move_to(TrajectoryState.MIGRATING)
        trajectory.rollout = rollout
        self._destined.setdefault(rollout, {})[trajectory.trajectory_id] = trajectory

    def destined(self, rollout: str) -> list[Trajectory]:
        """Trajectories that wait to go on at this rollout, in the order in which they were stopped."""
        return list(self._destined.get(rollout, {}).values())

    def take_waiting(self, rollout: str, policy_version: int, room: int) -> list[Trajectory]:
        """Up to `room` trajectories that this rollout may go on with now: those destined for it, then orphans.

        `room` is below 0 where a rollout has come back to another controller with trajectories that have ended
        meanwhile, and is about to say so.
        """
        if room <= 0:
            return []
        chosen = self.destined(rollout)[:room]
        for trajectory in chosen:
            self._undestine(trajectory)
        if self.orphans and len(chosen) < room:
            mine = [orphan for orphan in self.orphans.values() if self._may_go_on(orphan, policy_version)]
            for orphan in mine[: room - len(chosen)]:
                del self.orphans[orphan.trajectory_id]
                chosen.append(orphan)
        return chosen

    def has_orphans_for(self, policy_version: int) -> bool:
        """Whether a rollout of this version could go on with an orphan."""
        return any(self._may_go_on(orphan, policy_version) for orphan in self.orphans.values())

    def start_over(self, trajectory: Trajectory) -> int:
        """An orphan whose version is gone for good starts anew, with that or a newer one; returns the tokens lost."""
        lost = trajectory.num_tokens
        trajectory.forget_tokens()
        return lost

    def withdraw(self, trajectory: Trajectory) -> None:
        """It leaves the pool: finished, or its group was dropped."""
        self._undestine(trajectory)
        self.orphans.pop(trajectory.trajectory_id, None)
        self._trajectories.pop(trajectory.trajectory_id, None)

    def _may_go_on(self, orphan: Trajectory, policy_version: int) -> bool:
        first = orphan.policy_version or 0
        if not orphan.versions or self._mixes_versions:  # never an older one: the group's staleness is counted from it
            return policy_version >= first
        return policy_version == first

    def _undestine(self, trajectory: Trajectory) -> None:
        """Whatever its state: its group may have been dropped meanwhile."""
        rollout = trajectory.rollout or ""
        for by_rollout in (self._destined, self._in_environment):
            waiting = by_rollout.get(rollout)
            if waiting is not None:
                waiting.pop(trajectory.trajectory_id, None)
                if not waiting:
                    del by_rollout[rollout]


def _misfit(trajectory: Trajectory, start: int, policy_version: int) -> str:
    """Why a delta under the current lease cannot be taken in."""
    leased_for = trajectory.versions[-1][0]
    if policy_version != leased_for:
        return (
            f"{trajectory.rollout} generated tokens of trajectory {trajectory.trajectory_id} with version "
            f"{policy_version}; it was leased for version {leased_for}"
        )
    return (
        f"{trajectory.rollout} sent tokens of trajectory {trajectory.trajectory_id} from number {start} on; "
        f"only {trajectory.num_tokens} had come before"
    )

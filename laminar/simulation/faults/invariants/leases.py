"""Leases fence late messages, and a trajectory in progress is in exactly one place.

One place: in flight on one rollout, or an orphan, or destined for one rollout, or in the environment's hands.
"""

from __future__ import annotations

from laminar.controller.controller import Controller
from laminar.controller.replica import Replica
from laminar.protocol.messages import TrajectoryDeltas
from laminar.simulation.faults.invariants.invariant import Invariant, Observed
from laminar.trajectory import Trajectory, TrajectoryState

IN_PROGRESS = (TrajectoryState.GENERATING, TrajectoryState.MIGRATING, TrajectoryState.ORPHANED)


class LeasesFence(Invariant):
    """No token that comes under an old lease is taken in. Looks at every message of deltas as it is handed to the pool."""

    name = "leases fence late messages"

    def watch(self, controller: Controller) -> None:
        """See `Invariant`."""
        pool = controller.pool
        take_in = pool.take_in

        def watched(message: TrajectoryDeltas, now: float) -> list[Trajectory]:
            before = {
                one: (t.lease, t.num_tokens) for one in message.trajectory_ids if (t := pool.get(one)) is not None
            }
            trajectories = {one: pool.get(one) for one in before}
            ended = take_in(message, now)
            may_have = {trajectory_id: tokens for trajectory_id, (_, tokens) in before.items()}
            deltas = zip(
                message.trajectory_ids,
                message.leases,
                message.starts.tolist(),
                message.token_counts.tolist(),
                strict=True,
            )
            current = dict.fromkeys(before, False)  # whether some delta came under the current lease
            for trajectory_id, lease, start, count in deltas:
                if trajectory_id in before and lease == before[trajectory_id][0] and start <= may_have[trajectory_id]:
                    may_have[trajectory_id] = max(may_have[trajectory_id], start + count)
                    current[trajectory_id] = True
            for trajectory_id, trajectory in trajectories.items():
                assert trajectory is not None
                lease, tokens = before[trajectory_id]
                if trajectory.num_tokens not in (tokens, may_have[trajectory_id]):
                    self.fail(
                        f"trajectory {trajectory_id}, lease {lease}, {tokens} tokens: has {trajectory.num_tokens} after deltas "
                        f"under leases {message.leases}, from numbers {message.starts.tolist()} on"
                    )
            for trajectory in ended:
                if not current.get(trajectory.trajectory_id):
                    self.fail(f"trajectory {trajectory.trajectory_id} was ended by a delta under an old lease")
            return ended

        pool.take_in = watched  # type: ignore[method-assign]


class OnePlace(Invariant):
    """See the module's text."""

    name = "a trajectory in progress is in one place"

    def __init__(self, run: Observed) -> None:
        super().__init__(run)
        self._within: dict[str, Replica] = {}  # have had no more than they may: they never get more again

    def recount(self) -> None:
        """See `Invariant`."""
        pool, replicas = self.controller.pool, self.controller.rollouts.replicas
        holders: dict[str, list[str]] = {}
        for replica in replicas.values():
            for trajectory_id, trajectory in replica.in_flight.items():
                holders.setdefault(trajectory_id, []).append(replica.name)
                if pool.get(trajectory_id) is not trajectory:
                    self.fail(f"{replica.name} holds trajectory {trajectory_id}, which is not in progress")
                if trajectory.rollout != replica.name or trajectory.state is not TrajectoryState.GENERATING:
                    self.fail(
                        f"{replica.name} holds trajectory {trajectory_id}, which is {trajectory.state.value} on {trajectory.rollout}"
                    )
            if len(replica.in_flight) <= self.run.config.rollout.max_running:
                self._within[replica.name] = replica
            elif self._within.get(replica.name) is replica:
                # Not one that has just come back to another controller: some of what it holds has ended there meanwhile.
                self.fail(f"{replica.name} holds {len(replica.in_flight)} trajectories: more than rollout.max_running")
        for rollout in pool._destined:
            for trajectory in pool.destined(rollout):
                holders.setdefault(trajectory.trajectory_id, []).append(f"destined for {rollout}")
                if rollout not in replicas or trajectory.state is not TrajectoryState.MIGRATING:
                    self.fail(
                        f"trajectory {trajectory.trajectory_id}, {trajectory.state.value}, is destined for {rollout}"
                    )
        for rollout in pool._in_environment:
            for trajectory in pool.in_environment(rollout):
                holders.setdefault(trajectory.trajectory_id, []).append(f"comes back to {rollout}")
                if (rollout and rollout not in replicas) or trajectory.state is not TrajectoryState.ENVIRONMENT:
                    self.fail(
                        f"trajectory {trajectory.trajectory_id}, {trajectory.state.value}, comes back to {rollout}"
                    )
        for rollout, awaited in self.controller.fleet._awaited.items():
            for trajectory_id, trajectory in awaited.items():
                if pool.get(trajectory_id) is trajectory:  # else its group was dropped meanwhile
                    holders.setdefault(trajectory_id, []).append(f"awaited with {rollout}")
        for trajectory_id, trajectory in pool.orphans.items():
            holders.setdefault(trajectory_id, []).append("orphans")
            if trajectory.state is not TrajectoryState.ORPHANED:
                self.fail(f"trajectory {trajectory_id} is among the orphans, and {trajectory.state.value}")
        for trajectory in pool:
            places = holders.pop(trajectory.trajectory_id, [])
            if len(places) != 1:
                self.fail(
                    f"trajectory {trajectory.trajectory_id} ({trajectory.state.value}) is in {places or 'no place'}"
                )
        if holders:
            self.fail(f"trajectories that are not in progress are in places: {holders}")

"""Exported KV that waits for the rollout that goes on with its trajectory.

Invariant: an export that the controller has heard of is known here as long as its trajectory may be leased with it; afterwards
its exporter is told to drop it, or, if that is lost, another rollout of its host. Without any, the exporter's successor removes
it when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from laminar.controller.replica import Replica
from laminar.protocol.messages import KvReference, KvTaken, RolloutLoad
from laminar.trajectory import Trajectory, TrajectoryState

STOPPED = (TrajectoryState.MIGRATING, TrajectoryState.ORPHANED)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Waiting:
    reference: KvReference
    host: str  # of its exporter


class KvExports:
    """By trajectory, one each: the newest."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        """`replicas`: rollouts that are there, by name."""
        self._replicas = replicas
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[KvReference]:
        return iter([waiting.reference for waiting in self._waiting.values()])

    def take_in(self, references: Iterable[KvReference], ended: Iterable[Trajectory], host: str) -> None:
        """The KV that came with the last deltas of trajectories, of which `ended` were taken in."""
        stopped = {trajectory.trajectory_id for trajectory in ended if trajectory.state in STOPPED}
        for reference in references:
            known = self._waiting.get(reference.trajectory_id)
            if known is not None and known.reference == reference:
                continue  # said twice
            waiting = _Waiting(reference=reference, host=host)
            if reference.trajectory_id in stopped:
                self.over(reference.trajectory_id)
                self._waiting[reference.trajectory_id] = waiting
            else:
                self._drop(waiting)

    def of(self, trajectory: Trajectory, policy_version: int) -> KvReference | None:
        """The KV that a rollout of this version may import to go on with the trajectory."""
        waiting = self._waiting.get(trajectory.trajectory_id)
        if waiting is None or waiting.reference.policy_version != policy_version:
            return None
        return waiting.reference

    def taken(self, message: KvTaken) -> None:
        """A rollout is through with it."""
        waiting = self._waiting.get(message.trajectory_id)
        if waiting is not None and waiting.reference.name == message.name:
            self.over(message.trajectory_id)

    def over(self, trajectory_id: str) -> None:
        """Nobody will import it: it was imported, or the trajectory has ended or starts anew."""
        waiting = self._waiting.pop(trajectory_id, None)
        if waiting is not None:
            self._drop(waiting)

    def _drop(self, waiting: _Waiting) -> None:
        replica = self._replicas.get(waiting.reference.exporter)
        if replica is None:
            replica = next((other for other in self._replicas.values() if other.host == waiting.host), None)
        if replica is not None:
            replica.kv_to_drop.append(waiting.reference.name)
            replica.wake.set()


def moving_pays(source: RolloutLoad, target: RolloutLoad) -> bool:
    """Whether moving a token's KV takes less time than its prefill at the target; as long as one is not measured: yes."""
    prefill = target.prefill_s_per_token or source.prefill_s_per_token
    move = max(source.kv_move_s_per_token, target.kv_move_s_per_token)
    return not prefill or move < prefill

"""How long trajectories wait whose rollout was lost, or left, until all of them go on elsewhere.

Invariant: every trajectory that is told here as orphaned is counted in one `TrajectoriesRecovered`, unless the run ends before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from laminar.observability.events import (
    EventBus,
    GroupDropped,
    TrajectoriesRecovered,
    TrajectoryFinished,
    TrajectoryMoved,
    TrajectoryRestarted,
)
from laminar.trajectory import Trajectory


@dataclass(kw_only=True, slots=True)
class _Loss:
    rollout: str
    last: float  # when the last of them lost its rollout
    trajectories: int = 0
    regenerated: int = 0
    waiting: dict[str, None] = field(default_factory=dict)


class Recoveries:
    """Subscribes to what happens to trajectories."""

    def __init__(self, events: EventBus, now: Callable[[], float]) -> None:
        self._events = events
        self._now = now
        self._open: dict[str, _Loss] = {}  # by rollout
        self._loss_of: dict[str, _Loss] = {}  # by trajectory
        events.subscribe(lambda event: self._settled(event.trajectory), TrajectoryMoved, TrajectoryFinished)
        events.subscribe(self._on_restarted, TrajectoryRestarted)
        events.subscribe(self._on_dropped, GroupDropped)

    def orphaned(self, trajectory: Trajectory, rollout: str) -> None:
        """It has just lost this rollout."""
        self._settled(trajectory)  # from another loss: counted where it waited first
        loss = self._open.setdefault(rollout, _Loss(rollout=rollout, last=self._now()))
        loss.last = self._now()
        loss.trajectories += 1
        loss.waiting[trajectory.trajectory_id] = None
        self._loss_of[trajectory.trajectory_id] = loss

    def _on_restarted(self, event: TrajectoryRestarted) -> None:
        if loss := self._loss_of.get(event.trajectory.trajectory_id):
            loss.regenerated += 1

    def _on_dropped(self, event: GroupDropped) -> None:
        for trajectory in event.group.trajectories:
            self._settled(trajectory)

    def _settled(self, trajectory: Trajectory) -> None:
        loss = self._loss_of.pop(trajectory.trajectory_id, None)
        if loss is None:
            return
        del loss.waiting[trajectory.trajectory_id]
        if loss.waiting:
            return
        del self._open[loss.rollout]
        self._events.emit(
            TrajectoriesRecovered(
                rollout=loss.rollout,
                trajectories=loss.trajectories,
                regenerated=loss.regenerated,
                seconds=self._now() - loss.last,
            )
        )

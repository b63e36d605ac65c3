"""Admitted groups until they are trained: which are complete, which are still on their way.

Invariants: a group is admitted once and leaves once (trained or dropped); only whole groups are handed out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

from laminar.controller.schedules.schedule import ReadyGroup, Schedule
from laminar.observability.events import EventBus, GroupCompleted, GroupDropped
from laminar.trajectory import Group, TrajectoryState


class ExperienceBuffer:
    """Groups by state; `changed` is set whenever a batch may have become possible."""

    def __init__(self, events: EventBus) -> None:
        self.admitted = 0  # ever, less the dropped ones
        self.dropped = 0
        self.trained = 0
        self.changed = asyncio.Event()
        self._events = events
        self._outstanding: dict[int, Group] = {}  # admitted, not trained or dropped
        self._ready: dict[int, Group] = {}  # those of them that are complete

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._outstanding.values())

    @property
    def in_progress(self) -> int:
        """Groups that are admitted and not complete."""
        return len(self._outstanding) - len(self._ready)

    def ready_groups(self) -> list[Group]:
        """Complete groups, in order of completion."""
        return list(self._ready.values())

    def get(self, group_id: int) -> Group | None:
        """An outstanding group."""
        return self._outstanding.get(group_id)

    def admit(self, group: Group) -> None:
        """A group starts on a rollout; its policy version is known."""
        self._outstanding[group.group_id] = group
        self.admitted += 1

    def complete(self, group: Group) -> None:
        """All members are scored."""
        for trajectory in group.trajectories:
            trajectory.move_to(TrajectoryState.BUFFERED)
        self._ready[group.group_id] = group
        self._events.emit(GroupCompleted(group=group))
        self.changed.set()

    def drop(self, group: Group, reason: str) -> None:
        """A group will not be trained; its place may be taken by another."""
        if self._outstanding.pop(group.group_id, None) is None:
            return
        self._ready.pop(group.group_id, None)
        self.admitted -= 1
        self.dropped += 1
        for trajectory in group.trajectories:
            if trajectory.state is not TrajectoryState.FAILED:
                trajectory.move_to(TrajectoryState.EVICTED)
        self._events.emit(GroupDropped(group=group, reason=reason))
        self.changed.set()

    def take_batch(self, schedule: Schedule, *, published_version: int, no_more_groups: bool) -> list[Group] | None:
        """The next step's groups, in order of admission, now TRAINING; None if the schedule wants to wait."""
        ready = [ReadyGroup(group_id=group.group_id, policy_version=_version(group)) for group in self._ready.values()]
        outstanding = Counter(_version(group) for group in self._outstanding.values())
        chosen = schedule.select(ready, outstanding, published_version=published_version, no_more_groups=no_more_groups)
        if chosen is None:
            return None
        groups = [self._ready.pop(group_id) for group_id in sorted(chosen)]
        for group in groups:
            del self._outstanding[group.group_id]
            for trajectory in group.trajectories:
                trajectory.move_to(TrajectoryState.TRAINING)
        return groups

    def consume(self, groups: list[Group], step: int) -> None:
        """The step has been made."""
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.step = step
                trajectory.move_to(TrajectoryState.CONSUMED)
        self.trained += len(groups)


def _version(group: Group) -> int:
    if group.policy_version is None:
        raise RuntimeError(f"group {group.group_id} was admitted without a policy version")
    return group.policy_version

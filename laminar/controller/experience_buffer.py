"""Admitted groups until they are trained: which are complete, which are still on their way.

Invariants: a group is admitted once and leaves once (trained or dropped), unless the trainer loses the step that consumed
it; only whole groups are handed out; every drop has a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from laminar.config.schema import BufferConfig
from laminar.controller.buffer_strategies import evictions
from laminar.controller.dynamic_sampling import DynamicSampling
from laminar.controller.journal.restore import Restored
from laminar.controller.schedules.schedule import ReadyGroup, Schedule
from laminar.observability.events import EventBus, GroupCompleted, GroupDropped, GroupsReturned, Notice
from laminar.trajectory import Group, TrajectoryState


class ExperienceBuffer:
    """Groups by state; `changed` is set whenever a batch may have become possible."""

    def __init__(
        self,
        events: EventBus,
        config: BufferConfig,
        sampling: DynamicSampling,
        *,
        steps: int,
        restored: Restored | None = None,
    ) -> None:
        """
        Args:
            steps: that the run is to make.
            restored: what an earlier controller of this run has left.
        """
        before = restored or Restored(life=0)
        self.dropped = before.dropped
        self.resampled = before.filtered  # those of them that dynamic sampling has refused
        self.trained = before.trained
        self.taken = len(before.in_training)  # by the step in the making
        # Ever, less the dropped ones.
        self.admitted = len(before.outstanding) + self.taken + self.trained + before.left
        self.steps_left = steps - before.step
        self.changed = asyncio.Event()
        self._events = events
        self._config = config
        self._sampling = sampling
        self._completed = 0
        self._outstanding: dict[int, Group] = {}  # admitted, not trained or dropped
        self._ready: dict[int, ReadyGroup] = {}  # those of them that are complete
        self._versions: dict[int, int] = {}  # outstanding group -> version
        for group in before.outstanding:
            self._outstanding[group.group_id] = group
            self._versions[group.group_id] = _version(group)
            if all(trajectory.state is TrajectoryState.BUFFERED for trajectory in group.trajectories):
                self._make_ready(group)

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._outstanding.values())

    @property
    def outstanding(self) -> int:
        """Groups that are admitted and not trained or dropped."""
        return len(self._outstanding)

    @property
    def in_progress(self) -> int:
        """Groups that are admitted and not complete."""
        return len(self._outstanding) - len(self._ready)

    def ready_groups(self) -> list[Group]:
        """Complete groups, in order of completion."""
        return [self._outstanding[group_id] for group_id in self._ready]

    def get(self, group_id: int) -> Group | None:
        """An outstanding group."""
        return self._outstanding.get(group_id)

    def admit(self, group: Group) -> None:
        """A group starts on a rollout; its policy version is known."""
        self._outstanding[group.group_id] = group
        self._versions[group.group_id] = _version(group)
        self.admitted += 1

    def complete(self, group: Group, *, published_version: int) -> None:
        """All members are scored: it is ready, unless dynamic sampling wants another in its place.

        What the buffer may not keep any more is evicted.
        """
        verdict = self._sampling.judge(group)
        if verdict == "refuse":
            self.resampled += 1
            self.drop(group, "all rewards are equal (algorithm.dynamic_sampling)", resampled=True)
            return
        if verdict == "limit reached":
            text = (
                f"{self._sampling.limit} groups since the last step had rewards that are all equal "
                "(algorithm.dynamic_sampling.max_refills): such groups are trained until the next step; is the task too hard, "
                "or learned?"
            )
            self._events.emit(Notice(level="warning", text=text))
        for trajectory in group.trajectories:
            trajectory.move_to(TrajectoryState.BUFFERED)
        self._make_ready(group)
        self._events.emit(GroupCompleted(group=group))
        self.evict(published_version)
        self.changed.set()

    def evict(self, published_version: int) -> None:
        """Leave out complete groups by `buffer.capacity` and `buffer.max_age`."""
        if self._config.capacity is None and self._config.max_age is None:
            return
        ready = list(self._ready.values())
        for group_id, reason in evictions(
            ready,
            published_version=published_version,
            capacity=self._config.capacity,
            max_age=self._config.max_age,
        ):
            self.drop(self._outstanding[group_id], reason)

    def drop_stale(self, schedule: Schedule, published_version: int) -> None:
        """Leave out the groups that cannot be trained within `schedule.max_staleness` any more."""
        outstanding = [(group_id, _version(g), group_id in self._ready) for group_id, g in self._outstanding.items()]
        for group_id in schedule.stale(outstanding, published_version=published_version):
            group = self._outstanding[group_id]
            reason = f"cannot be trained in time: version {group.policy_version}, trainer {published_version}"
            self.drop(group, f"{reason} (schedule.on_stale)")

    def drop(self, group: Group, reason: str, *, resampled: bool = False) -> None:
        """A group will not be trained; its place may be taken by another."""
        if self._outstanding.pop(group.group_id, None) is None:
            return
        self._forget(group)
        self.admitted -= 1
        self.dropped += 1
        for trajectory in group.trajectories:
            if trajectory.state is not TrajectoryState.FAILED:
                trajectory.move_to(TrajectoryState.EVICTED)
        self._events.emit(GroupDropped(group=group, reason=reason, resampled=resampled))
        self.changed.set()

    def take_batch(
        self, schedule: Schedule, *, published_version: int, part: int, no_more_groups: bool
    ) -> list[Group] | None:
        """The next groups to train, in order of admission, now TRAINING; None if the schedule wants to wait."""
        if len(self._ready) < schedule.batch_groups and not no_more_groups:
            return None
        chosen = schedule.select(
            list(self._ready.values()),
            self._versions,
            published_version=published_version,
            part=part,
            no_more_groups=no_more_groups,
        )
        if chosen is None:
            return None
        groups = [self._outstanding.pop(group_id) for group_id in sorted(chosen)]
        for group in groups:
            self._forget(group)
            self.taken += 1
            for trajectory in group.trajectories:
                trajectory.staleness = published_version - (trajectory.policy_version or 0)
                trajectory.move_to(TrajectoryState.TRAINING)
        return groups

    def consume(self, groups: list[Group], step: int) -> None:
        """The step has been made."""
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.step = step
                trajectory.move_to(TrajectoryState.CONSUMED)
        self.trained += len(groups)
        self.taken = 0
        self._sampling.step_made()

    def leave(self, groups: list[Group], reason: str) -> None:
        """The data ended, and these do not fill a step: nobody trains them."""
        self.taken -= len(groups)
        for group in groups:
            self._events.emit(GroupDropped(group=group, reason=reason))

    def give_back(self, groups: list[Group]) -> None:
        """The trainer lost the steps that consumed these groups: they are to be trained (again)."""
        for group in groups:
            if group.trajectories[0].state is TrajectoryState.CONSUMED:
                self.trained -= 1
            else:
                self.taken -= 1
            for trajectory in group.trajectories:
                trajectory.step = trajectory.staleness = None
                trajectory.move_to(TrajectoryState.BUFFERED)
            self._outstanding[group.group_id] = group
            self._versions[group.group_id] = _version(group)
            self._make_ready(group)
        self._events.emit(GroupsReturned(groups=groups))
        self.changed.set()

    def forget(self, groups: list[Group]) -> None:
        """The steps that consumed them are lost, and nothing is left but their prompts, which are drawn again."""
        self.trained -= len(groups)
        self.admitted -= len(groups)

    def _make_ready(self, group: Group) -> None:
        self._completed += 1
        self._ready[group.group_id] = ReadyGroup(
            group_id=group.group_id, policy_version=_version(group), completed=self._completed
        )

    def _forget(self, group: Group) -> None:
        self._ready.pop(group.group_id, None)
        del self._versions[group.group_id]


def _version(group: Group) -> int:
    if group.policy_version is None:
        raise RuntimeError(f"group {group.group_id} was admitted without a policy version")
    return group.policy_version

"""The counts of the experience buffer, the pool and the environments add up, at any moment between two callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.controller.journal.restore import Restored
from laminar.observability.events import EvaluationStartedOver, GroupDropped, TrajectoryFinished
from laminar.simulation.faults.invariants.invariant import Invariant, Observed
from laminar.simulation.faults.invariants.once import EachPromptEndsOnce
from laminar.trajectory import Group, TrajectoryState

PENDING = (
    TrajectoryState.GENERATING,
    TrajectoryState.ENVIRONMENT,
    TrajectoryState.MIGRATING,
    TrajectoryState.ORPHANED,
)


class CountsAddUp(Invariant):
    """See the module's text."""

    name = "counts add up"

    def __init__(self, run: Observed, ledger: EachPromptEndsOnce) -> None:
        super().__init__(run)
        self._ledger = ledger
        self._left = 0  # that an earlier controller has left
        self._withdrawn = 0  # finished trajectories of dropped groups: their scores may still be pending
        self._finished: dict[str, None] = {}

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """See `Invariant`."""
        return {
            TrajectoryFinished: self._on_finished,
            GroupDropped: self._on_dropped,
            EvaluationStartedOver: self._on_started_over,
        }

    def _on_started_over(self, event: EvaluationStartedOver) -> None:
        self._withdrawn += event.scores_pending

    def _on_finished(self, event: TrajectoryFinished) -> None:
        trajectory_id = event.trajectory.trajectory_id
        if trajectory_id in self._finished:
            self.fail(f"trajectory {trajectory_id} has finished twice")
        self._finished[trajectory_id] = None

    def _on_dropped(self, event: GroupDropped) -> None:
        self._withdrawn += sum(trajectory.finished_at is not None for trajectory in event.group.trajectories)

    def taken_up(self, restored: Restored) -> None:
        """See `Invariant`."""
        self._withdrawn = 0
        self._left = restored.left
        unfinished = {t.trajectory_id for g in restored.groups for t in g.trajectories if t.finish_reason is None}
        groups = {one: one.partition(".")[0] for one in self._finished}
        self._finished = {
            one: None
            for one, group in groups.items()  # without those of evaluations, which never come again under these names
            if one not in unfinished and group.isdecimal() and int(group) < restored.next_group
        }

    def recount(self) -> None:
        """See `Invariant`."""
        self._recount_buffer()
        self._recount_trajectories()

    def _recount_buffer(self) -> None:
        buffer, ledger = self.controller.buffer, self._ledger
        outstanding = [group.group_id for group in buffer]
        training = [group.group_id for group in self.controller.trainer._in_training]
        if buffer.outstanding != len(outstanding) or len(buffer) + buffer.in_progress != len(outstanding):
            self.fail(
                f"buffer: {len(buffer)} ready, {buffer.in_progress} in progress, {buffer.outstanding} outstanding, "
                f"{len(outstanding)} counted"
            )
        if buffer.trained != len(ledger.trained):
            self.fail(f"buffer: {buffer.trained} trained, {len(ledger.trained)} by the events")
        left = len(ledger.dropped) - buffer.dropped  # by data.last_batch: after them nothing is admitted
        if left > self._left and not self.controller.prompts.ended:
            self.fail(f"buffer: {buffer.dropped} dropped, {len(ledger.dropped)} by the events")
        if buffer.admitted != len(outstanding) + len(training) + len(ledger.trained) + left:
            self.fail(
                f"buffer: {buffer.admitted} admitted; {len(outstanding)} outstanding, {len(training)} in training, "
                f"{len(ledger.trained)} trained, {left} left at the end"
            )
        if len(ledger.admitted) != buffer.admitted + buffer.dropped:
            self.fail(f"buffer: {buffer.admitted} admitted, {buffer.dropped} dropped, {len(ledger.admitted)} started")
        if buffer.taken != len(training):
            self.fail(f"buffer: {buffer.taken} taken by the step in the making, {len(training)} in training")
        left = self.run.config.trainer.steps - self.controller.trainer.step
        if buffer.steps_left != left:
            self.fail(f"buffer: {buffer.steps_left} steps left, {left} by the trainer's step")

    def _recount_trajectories(self) -> None:
        in_progress = finished = 0
        ready = {group.group_id for group in self.controller.buffer.ready_groups()}
        for group in self.controller.buffer:
            self._check_group(group, group.group_id in ready)
            for trajectory in group.trajectories:
                in_progress += trajectory.state in PENDING
                finished += trajectory.state is TrajectoryState.FINISHED
        evaluation = self.controller.evaluator.running
        if evaluation is not None:
            in_progress += len(evaluation.in_progress)
            finished += sum(trajectory.state is TrajectoryState.FINISHED for trajectory in evaluation.trajectories)
        if in_progress != len(self.controller.pool):
            self.fail(
                f"{len(self.controller.pool)} trajectories in the pool, {in_progress} of outstanding groups and of an evaluation "
                "in progress"
            )
        with_environment = sum(t.state is TrajectoryState.ENVIRONMENT for t in self.controller.pool)
        if self.controller.turns.pending < with_environment:
            self.fail(
                f"{with_environment} trajectories wait for the environment, {self.controller.turns.pending} turns pending"
            )
        pending = self.controller.environments.pending_scores
        if not finished <= pending <= finished + self._withdrawn:
            self.fail(
                f"{pending} scores pending, {finished} trajectories finished, {self._withdrawn} of dropped groups"
            )

    def _check_group(self, group: Group, ready: bool) -> None:
        buffered = sum(trajectory.state is TrajectoryState.BUFFERED for trajectory in group.trajectories)
        if ready != (buffered == len(group.trajectories)) or (buffered and not ready):
            states = [trajectory.state.value for trajectory in group.trajectories]
            self.fail(f"group {group.group_id} counts as {'ready' if ready else 'in progress'}; its members: {states}")

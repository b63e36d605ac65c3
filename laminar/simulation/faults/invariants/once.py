"""Each prompt that was taken ends exactly once: trained by a step that the trainer still has, or named with a reason.

Kept by a ledger of its own, from the controller's events; and a second one from the messages that the trainer got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.controller.journal.restore import Restored
from laminar.observability.events import (
    GroupDropped,
    GroupsReturned,
    PromptRejected,
    StepFinished,
    TrainerRestarted,
    TrajectoryStarted,
)
from laminar.simulation.faults.invariants.invariant import Invariant, Observed


class EachPromptEndsOnce(Invariant):
    """See the module's text."""

    name = "each prompt ends exactly once"

    def __init__(self, run: Observed) -> None:
        super().__init__(run)
        self.admitted: dict[int, int] = {}  # group -> prompt
        self.trained: dict[int, int] = {}  # group -> surviving step
        self.dropped: dict[int, str] = {}  # group -> reason
        self.rejected: dict[int, str] = {}  # prompt -> reason
        self._group_of: dict[int, int] = {}  # prompt -> group

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """See `Invariant`."""
        return {
            TrajectoryStarted: self._on_started,
            StepFinished: self._on_step,
            GroupDropped: self._on_dropped,
            GroupsReturned: self._on_returned,
            TrainerRestarted: self._on_restarted,
            PromptRejected: self._on_rejected,
        }

    def taken_up(self, restored: Restored) -> None:
        """See `Invariant`."""
        unended = {group.group_id for group in (*restored.outstanding, *restored.in_training)}
        for group_id in [group_id for group_id in self.admitted if group_id >= restored.next_group]:
            if self._end_of(group_id):
                self.fail(f"the journal has not heard of group {group_id}, which {self._end_of(group_id)}")
            del self._group_of[self.admitted.pop(group_id)]
        for group_id in unended & self.trained.keys():
            if self.trained.pop(group_id) != restored.step + 1:
                self.fail(f"the journal has forgotten that group {group_id} is trained; it knows step {restored.step}")
        for step, groups in enumerate(
            restored.since_checkpoint, start=restored.step - len(restored.since_checkpoint) + 1
        ):
            self.trained.update(
                {group.group_id: step for group in groups}
            )  # that they were returned had not been written
        for group_id in unended & self.dropped.keys():
            del self.dropped[group_id]
        self.rejected = {prompt_id: why for prompt_id, why in self.rejected.items() if prompt_id in restored.rejected}
        lost = [one for one in self.admitted if not self._end_of(one) and one not in unended]
        if lost or unended - self.admitted.keys():
            self.fail(
                f"the journal lacks groups {lost}, and knows {sorted(unended - self.admitted.keys())} that nobody does"
            )

    def _on_started(self, event: TrajectoryStarted) -> None:
        if event.trajectory.evaluation is not None:
            return  # held-out prompts have positions of their own; `evaluations.py` looks after them
        group_id, prompt_id = event.trajectory.group_id, event.trajectory.prompt.prompt_id
        if self._group_of.setdefault(prompt_id, group_id) != group_id or prompt_id in self.rejected:
            self.fail(f"prompt {prompt_id} is taken again, as group {group_id}")
        self.admitted[group_id] = prompt_id

    def _on_rejected(self, event: PromptRejected) -> None:
        if event.prompt_id in self.rejected or event.prompt_id in self._group_of or not event.reason:
            self.fail(f"prompt {event.prompt_id} is rejected ({event.reason!r}) after it had ended or been taken")
        self.rejected[event.prompt_id] = event.reason

    def _on_step(self, event: StepFinished) -> None:
        for group in event.groups:
            end = self._end_of(group.group_id)
            if end or group.group_id not in self.admitted:
                self.fail(f"step {event.step} trains group {group.group_id}, which {end or 'never started'}")
            self.trained[group.group_id] = event.step
            if any(trajectory.step != event.step for trajectory in group.trajectories):
                self.fail(f"step {event.step} has trained group {group.group_id}, and its trajectories do not say so")

    def _on_dropped(self, event: GroupDropped) -> None:
        group_id = event.group.group_id
        end = self._end_of(group_id)
        if end or group_id not in self.admitted:
            self.fail(f"group {group_id} is dropped, which {end or 'never started'}")
        if not event.reason:
            self.fail(f"group {group_id} is dropped without a reason")
        self.dropped[group_id] = event.reason

    def _on_returned(self, event: GroupsReturned) -> None:
        for group in event.groups:
            if group.group_id in self.dropped or group.group_id not in self.admitted:
                self.fail(
                    f"group {group.group_id} is returned, which {self._end_of(group.group_id) or 'never started'}"
                )
            self.trained.pop(group.group_id, None)

    def _on_restarted(self, event: TrainerRestarted) -> None:
        lost = [group_id for group_id, step in self.trained.items() if step > event.step]
        if lost:
            self.fail(f"the trainer is back at step {event.step}; groups {lost} of later steps count as trained")

    def _end_of(self, group_id: int) -> str:
        if group_id in self.dropped:
            return f"was dropped before: {self.dropped[group_id]}"
        if group_id in self.trained:
            return f"step {self.trained[group_id]} has trained"
        return ""

    def at_end(self) -> None:
        """Whatever has not ended is outstanding, and the buffer lists it; when the data ended well, nothing is."""
        listed = {group.group_id for group in self.controller.buffer}
        left = [group_id for group_id in self.admitted if not self._end_of(group_id)]
        lost = [group_id for group_id in left if group_id not in listed and group_id not in self._in_training()]
        if lost:
            self.fail(f"groups {lost} have neither ended nor are they outstanding")
        twice = [group_id for group_id in listed if self._end_of(group_id)]
        if twice:
            self.fail(f"groups {twice} have ended, and the buffer lists them as outstanding")

    def _in_training(self) -> list[int]:
        return [group.group_id for group in self.controller.trainer._in_training]

    def unfinished_epoch(self) -> str:
        """What of the data has not ended; empty if all has. For runs that say that the data has ended."""
        if self.run.prompts is None:
            return "the data never ends"
        missing = [
            prompt_id
            for prompt_id in range(self.run.prompts)
            if prompt_id not in self.rejected and not self._end_of(self._group_of.get(prompt_id, -1))
        ]
        return f"prompts {missing} have not ended" if missing else ""

"""Nothing waits without limit: something gets further within the controller's own limits, unless the user has paused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.observability.events import (
    CheckpointFinished,
    GroupCompleted,
    GroupDropped,
    StepFinished,
    StepStarted,
    TokensAppended,
    TrainerRestarted,
    TrajectoryScored,
    TurnAnswered,
    WeightsPublished,
    WorkerReady,
)
from laminar.simulation.faults.invariants.invariant import Invariant, Observed

# Seconds that an orphan may wait: an outage until it is noticed, a restart or two, weights, and rollouts that are full.
ORPHAN_LIMIT_S = 60.0
OF_THE_TRAINER = (StepStarted, StepFinished, WeightsPublished, CheckpointFinished, TrainerRestarted)


class SomethingGetsFurther(Invariant):
    """See the module's text."""

    name = "nothing waits without limit"

    def __init__(self, run: Observed, now: Callable[[], float]) -> None:
        super().__init__(run)
        self._now = now
        self._last = self._last_of_trainer = now()
        self._what = "the start"
        controller = run.config.controller
        self._orphaned_at: dict[str, float] = {}  # seconds, by trajectory
        self._orphan_limit_s = ORPHAN_LIMIT_S
        self._limit_s = controller.step_timeout_s + controller.start_timeout_s

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """See `Invariant`."""
        kinds = (
            *(TurnAnswered, TrajectoryScored, GroupCompleted, GroupDropped),
            *(WorkerReady, *OF_THE_TRAINER),
        )
        return {TokensAppended: self._on_tokens, **dict.fromkeys(kinds, self._on_progress)}

    def _on_tokens(self, event: TokensAppended) -> None:
        if event.tokens:
            self._on_progress(event)

    def _on_progress(self, event: object) -> None:
        self._last, self._what = self._now(), type(event).__name__
        if isinstance(event, OF_THE_TRAINER):
            self._last_of_trainer = self._now()

    def recount(self) -> None:
        """See `Invariant`: an orphan goes on, or starts anew, within the time that bringing its rollout back may take."""
        orphans, now = self.controller.pool.orphans, self._now()
        if self.run.config.rollout.on_lost_version == "wait" or self.controller.control.generation_paused:
            self._orphaned_at.clear()
            return
        self._orphaned_at = {key: self._orphaned_at.get(key, now) for key in orphans}
        for trajectory_id, since in self._orphaned_at.items():
            if now - since > self._orphan_limit_s:
                self.fail(f"trajectory {trajectory_id} has been an orphan for {now - since:.0f} s")

    def look(self) -> None:
        """Called at every delivery of a message; heartbeats come as long as the run lasts."""
        control = self.controller.control
        if control.generation_paused or not control.training_allowed.is_set():
            self._last, self._what = self._now(), "a pause"
            self._last_of_trainer = self._now()
        if self._now() - self._last_of_trainer > self._limit_s:
            waited = self._now() - self._last_of_trainer
            self.fail(f"the trainer has not got further for {waited:.0f} s; {self.controller._describe_wait()}")
        silent = self._now() - self._last
        if silent > self._limit_s:
            self.fail(
                f"nothing has got further for {silent:.0f} s, since {self._what}; {self.controller._describe_wait()}"
            )

"""The trainer's own view: from the messages that rank 0 got, no surviving step trains a group that another trained.

Also: what is trained keeps `max_staleness`, and every rank gets the same. Independent of the controller's bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from laminar.observability.events import StepFinished, TrainerRestarted
from laminar.protocol.messages import (
    CheckpointSaved,
    Hello,
    LoadCheckpoint,
    SaveCheckpoint,
    TrainStep,
    WeightsPublished,
)
from laminar.simulation.faults.invariants.invariant import Invariant, Observed

RANK_0 = "trainer-0"


class TrainedOnceWithinTheBound(Invariant):
    """See the module's text."""

    name = "no group is trained twice, none beyond max_staleness"

    def __init__(self, run: Observed) -> None:
        super().__init__(run)
        self._steps: dict[int, dict[int, list[int]]] = {}  # step -> part -> groups; those of the living line only
        self._saved: dict[int, dict[int, dict[int, list[int]]]] = {}  # by checkpointed step: `_steps` then
        self._being_saved: dict[int, dict[int, dict[int, list[int]]]] = {}
        self._life = ""  # newest peer of rank 0
        self._newest_order = 0  # that it got
        self._restarts = 0
        self._published = -1

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """See `Invariant`."""
        return {StepFinished: self._on_step, TrainerRestarted: self._on_restarted}

    def message_handlers(self) -> dict[type, Callable[[str, bool, Any], None]]:
        """See `Invariant`."""
        return {
            Hello: self._on_hello,
            WeightsPublished: self._on_published,
            TrainStep: self._on_train,
            SaveCheckpoint: self._on_save,
            CheckpointSaved: self._on_saved,
            LoadCheckpoint: self._on_load,
        }

    def _on_train(self, peer: str, to_worker: bool, message: TrainStep) -> None:
        if peer != self._life or message.order <= self._newest_order:  # given again, and not obeyed again
            return
        self._newest_order = message.order
        groups = list(dict.fromkeys(message.group_ids.tolist()))
        if message.part == 0:
            self._steps[message.step] = {}
        parts = self._steps.setdefault(message.step, {})
        if message.part != len(parts):
            self.fail(f"step {message.step}: part {message.part} came after {len(parts)} parts")
        for step, earlier in self._steps.items():
            for part, trained in earlier.items():
                twice = sorted(set(trained) & set(groups))
                if twice:
                    self.fail(f"step {message.step} trains groups {twice}; step {step}, part {part} did already")
        parts[message.part] = groups
        self._check_staleness(message)

    def _on_published(self, peer: str, to_worker: bool, message: WeightsPublished) -> None:
        self._published = max(self._published, message.policy_version)

    def _check_staleness(self, message: TrainStep) -> None:
        bound = self.run.max_staleness
        lengths = message.prompt_lengths + message.response_lengths
        first_tokens = np.cumsum(lengths) - message.response_lengths
        versions = message.token_ids[first_tokens]  # the ids of tokens are the version that made them
        expected = self._published - versions
        # Under `partial` it is counted from the start, which may be one version before the first token.
        early = self.controller.rollouts.schedule.interrupts and bool((message.staleness >= expected).all())
        if not early and not np.array_equal(message.staleness, expected):
            self.fail(
                f"step {message.step}, part {message.part}: staleness {message.staleness.tolist()}; published: "
                f"{self._published}, made by versions {versions.tolist()}"
            )
        oldest, newest = int(message.staleness.max()), int(message.staleness.min())
        if newest < 0:
            self.fail(f"step {message.step} trains a trajectory of staleness {newest}")
        may_exceed = self.run.config.schedule.on_stale == "train" and self._places_were_lost(message.step)
        if bound is not None and oldest > bound and not may_exceed:
            self.fail(
                f"step {message.step} trains a trajectory of staleness {oldest}; schedule.max_staleness is {bound}, the trainer "
                f"has restarted {self._restarts} times"
            )

    def _places_were_lost(self, step: int) -> bool:
        """There were versions without a step (after a restart), or steps of fewer groups: what `on_stale` is for."""
        full = self.run.config.trainer.groups_per_step
        short = [made for made, parts in self._steps.items() if made < step and sum(map(len, parts.values())) < full]
        trainer = self.controller.trainer
        return trainer.policy_version > trainer.step or bool(short)

    def _on_hello(self, peer: str, to_worker: bool, message: Hello) -> None:
        """A process that was started anew knows nothing, until it has loaded a checkpoint."""
        if peer.partition("#")[0] == RANK_0 and peer != self._life:
            self._steps = {}
            self._life = peer

    def _on_save(self, peer: str, to_worker: bool, message: SaveCheckpoint) -> None:
        if peer == self._life:
            self._being_saved[message.step] = {step: dict(parts) for step, parts in self._steps.items()}

    def _on_saved(self, peer: str, to_worker: bool, message: CheckpointSaved) -> None:
        saved = self._being_saved.pop(message.step, None) if peer == self._life else None
        if saved is not None and not message.error:  # the first answer counts
            self._saved[message.step] = saved

    def _on_load(self, peer: str, to_worker: bool, message: LoadCheckpoint) -> None:
        if peer != self._life:
            return
        if message.step not in self._saved:
            self.fail(f"{peer} is to load the checkpoint of step {message.step}; saved: {sorted(self._saved)}")
        self._steps = {step: dict(parts) for step, parts in self._saved[message.step].items()}

    def _on_restarted(self, event: TrainerRestarted) -> None:
        self._restarts += 1
        ahead = sorted(step for step in self._steps if step > event.step)
        if ahead:
            self.fail(f"the trainer is said to be back at step {event.step}; it has made steps {ahead}")

    def _on_step(self, event: StepFinished) -> None:
        trained = sorted(group for part in self._steps.get(event.step, {}).values() for group in part)
        consumed = sorted(group.group_id for group in event.groups)
        if trained != consumed:
            self.fail(f"step {event.step} consumed groups {consumed}; the trainer was given {trained}")
        missing = [step for step in range(1, event.step) if step not in self._steps]
        if missing:
            self.fail(f"step {event.step} is made, and the trainer has not made steps {missing}")

"""Checkpoints as the controller sees them: asks the ranks to write one, knows the newest complete one, has it loaded.

Invariant: `newest` is complete and durable on every rank, or None.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from laminar.controller.journal.restore import Checkpoint
from laminar.controller.trainer_orders import TrainerOrders
from laminar.controller.worker_registry import WorkerRegistry
from laminar.errors import DamagedCheckpoint
from laminar.observability.events import CheckpointFinished, EventBus, Notice
from laminar.protocol import messages


class Checkpoints:
    """Those of one run, in its folder."""

    def __init__(
        self,
        registry: WorkerRegistry,
        events: EventBus,
        folder: Path,
        *,
        run_id: str,
        limit_s: float,
        newest: Checkpoint | None = None,
    ) -> None:
        """`limit_s`: longest time to write or to load one."""
        self.newest = newest
        self._run_id = run_id
        self.failed = ""  # why the last one could not be written; empty if it was
        self._registry = registry
        self._events = events
        self._folder = folder
        self._limit_s = limit_s

    async def save(self, orders: TrainerOrders, ranks: Sequence[str], *, step: int, policy_version: int) -> bool:
        """Write one; false, with a warning, if it could not be written.

        Raises:
            RunFailed: a rank did not answer within the limit.
            WorkerLost: a rank is gone.
        """
        path = str(self._folder / f"step-{step:06d}")
        if self.newest is not None and self.newest.path == path:
            return True
        order = await orders.save(step)
        message = messages.SaveCheckpoint(
            order=order.number,
            step=step,
            policy_version=policy_version,
            path=path,
            state=json.dumps({"run_id": self._run_id, "step": step, "policy_version": policy_version}),
        )
        answers = await self._registry.ask_all(
            ranks, message, messages.CheckpointSaved, self._limit_s, lambda saved: saved.step == step
        )
        self.failed = next((answer.error for answer in answers if answer.error), "")
        if self.failed:
            self._events.emit(Notice(level="warning", text=f"checkpoint of step {step} failed: {self.failed}"))
        else:
            self.newest = Checkpoint(step=step, path=path, policy_version=policy_version)
        orders.answered(order)
        self._events.emit(
            CheckpointFinished(
                step=step,
                path=path,
                seconds=max(answer.seconds for answer in answers),
                nbytes=sum(answer.nbytes for answer in answers),
                error=self.failed,
            )
        )
        return not self.failed

    async def load(self, orders: TrainerOrders, ranks: Sequence[str], checkpoint: Checkpoint) -> None:
        """Have all ranks go back to it.

        Raises:
            DamagedCheckpoint: its files are not those that were written.
            RunFailed: a rank did not answer within the limit.
            WorkerLost: a rank is gone.
        """
        order = await orders.load(checkpoint.step)
        message = messages.LoadCheckpoint(order=order.number, step=checkpoint.step, path=checkpoint.path)
        answers = await self._registry.ask_all(
            ranks,
            message,
            messages.CheckpointLoaded,
            self._limit_s,
            lambda loaded: loaded.step == checkpoint.step,
        )
        if damage := next((answer.damage for answer in answers if answer.damage), ""):
            raise DamagedCheckpoint(damage)
        orders.answered(order)

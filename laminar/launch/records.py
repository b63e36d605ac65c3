"""A run's journal file as its processes use it: who the run is, how often it had a controller, what the last one left.

Invariant: a run has one id and one secret for all its controllers, and each controller a number of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from pathlib import Path

from laminar.config.schema import ExperimentConfig
from laminar.controller.journal.journal import Journal
from laminar.controller.journal.restore import Restored, read_meta, restore
from laminar.controller.journal.tables import JOURNAL, create_journal, open_journal
from laminar.controller.journal.writer import ThreadWriter
from laminar.errors import UserError
from laminar.observability.events import EventBus, Notice


def create_records(run_dir: Path, config: ExperimentConfig, fingerprints: dict[str, str]) -> str:
    """Begin a run's journal; returns the run's id.

    Raises:
        UserError: it cannot be written.
    """
    run_id = f"{config.name[:60]}-{secrets.token_hex(4)}"
    try:
        create_journal(run_dir / JOURNAL)
        connection = open_journal(run_dir / JOURNAL)
        note(connection, run_id=run_id, hop_key=secrets.token_hex(32), config=config.model_dump_json(), **fingerprints)
        connection.close()
    except (OSError, sqlite3.Error) as error:
        raise UserError(
            f"{run_dir / JOURNAL}: cannot be written ({error}); choose another folder with --run-dir"
        ) from error
    return run_id


def note(connection: sqlite3.Connection, **values: str) -> None:
    """Set single values of a journal."""
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())


class Records:
    """For the controller's process; make it inside the loop."""

    def __init__(self, run_dir: Path) -> None:
        """Raises UserError if the journal is missing, foreign or damaged."""
        self.failure: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )  # the journal contradicts itself
        self._path = run_dir / JOURNAL
        self._connection = open_journal(self._path)
        meta = read_meta(self._connection)
        self.run_id = meta["run_id"]
        self.hop_key = bytes.fromhex(meta["hop_key"])
        self._life = int(meta.get("life", "0"))
        self._told = False

    def restore(self) -> Restored | None:
        """What the controllers before this one have left; None for the first. Counts this one."""
        restored = restore(self._connection) if self._life else None
        if restored is not None:
            restored.life = self._life
        note(self._connection, life=str(self._life + 1))
        self._connection.close()
        return restored

    def open_journal(self, config: ExperimentConfig, events: EventBus) -> Journal:
        """For this controller to write."""

        def trouble(error: str) -> None:
            if not self._told:
                self._told = True
                text = f"{self._path} cannot be written ({error}); new work waits until it can be"
                events.emit(Notice(level="warning", text=text))

        def failed(error: Exception) -> None:
            if not self.failure.done():
                self.failure.set_exception(error)

        return Journal(
            ThreadWriter(self._path, on_trouble=trouble, on_failure=failed),
            keep_checkpoints=config.trainer.keep_checkpoints,
            keep_trained=config.trainer.checkpoint_every > 0,
            limit_s=config.controller.step_timeout_s,
        )


def summary(restored: Restored, *, new_trainer: bool) -> str:
    """What a controller takes up, in one line."""
    base = 0 if restored.checkpoint is None else restored.checkpoint.step
    returned = [group for step in restored.since_checkpoint for group in step] + restored.in_training
    ready = sum(all(t.reward is not None for t in group.trajectories) for group in restored.outstanding)
    partial = [t for group in restored.outstanding for t in group.trajectories if t.finish_reason is None]
    parts = [
        f"taking up the run after step {restored.step} (controller {restored.life + 1})",
        f"{ready} groups ready, {len(restored.outstanding) - ready} in progress with {len(partial)} partial responses "
        f"({sum(t.num_tokens for t in partial)} tokens)",
    ]
    if new_trainer:
        parts.append(f"the trainer goes on from step {base}, and {len(returned)} groups return to the buffer")
    if restored.again:
        parts.append(f"{len(restored.again)} prompts are drawn again")
    if restored.asked:
        parts.append(f"as a person has asked: {', '.join(restored.asked)}")
    return "; ".join(parts)

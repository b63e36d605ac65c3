"""`laminar train`: check everything, make the run directory or take one up, and look after the run to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import uvloop

from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError
from laminar.launch.preflight import preflight
from laminar.launch.records import create_records
from laminar.launch.resume import fingerprints, take_up
from laminar.launch.run_lock import LOCK, RunLock
from laminar.launch.supervised import DAMAGED_CHECKPOINT
from laminar.launch.supervisor import Supervisor
from laminar.observability.run_directory import RunDirectory, check_is_one


def train(config_path: Path, overrides: Sequence[str], *, run_dir: Path | None, overwrite: bool) -> int:
    """Exit status of the run: 0; 1 if it failed; 2 if a worker found the user's input at fault; 130 after a second Ctrl-C.

    Raises:
        UserError: something is wrong that can be told before anything starts.
    """
    config = preflight(config_path, overrides)
    path = (run_dir or Path("runs") / config.name).resolve()
    lock = RunLock(path)
    if (path / LOCK).exists():
        lock.acquire()  # a run may live there
        lock.release()
    directory = RunDirectory.create(path, config, overwrite=overwrite)
    directory.close()
    lock.acquire()
    try:
        return _supervise(config, path, create_records(path, config, fingerprints(config)))
    finally:
        lock.release()


def resume(run_dir: Path, overrides: Sequence[str]) -> int:
    """Go on with a run that has stopped; exit status as `train`.

    Raises:
        UserError: it cannot be resumed, or not with these overrides; or it lives.
    """
    path = run_dir.resolve()
    check_is_one(path)
    lock = RunLock(path)
    lock.acquire()
    try:
        RunDirectory.open(path).close()  # whether it can be written
        config, run_id = take_up(path, overrides)
        return _supervise(config, path, run_id)
    finally:
        lock.release()


def _supervise(config: ExperimentConfig, path: Path, run_id: str) -> int:
    """Look after the run; where its newest checkpoint proves damaged under way, take it up again from an older one.

    Raises:
        UserError: none is sound.
    """

    async def run() -> int:
        return await Supervisor(config, path, run_id).run()

    for _ in range(config.trainer.keep_checkpoints):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(run())
        if status != DAMAGED_CHECKPOINT:
            return status
        config, run_id = take_up(path, [])
    raise UserError(
        f"{path}: the trainer finds checkpoints damaged in which this process finds no damage; see logs/trainer-*.log, and whether both see the same files"
    )

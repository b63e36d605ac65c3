"""`laminar train`: check everything, make the run directory, run, sum up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from laminar.config.schema import ExperimentConfig
from laminar.launch import controller_process
from laminar.launch.commands import expected_workers
from laminar.launch.preflight import preflight
from laminar.launch.run import Interrupted, LocalRun
from laminar.observability.events import EventBus
from laminar.observability.run_directory import RunDirectory
from laminar.observability.terminal import Terminal


def train(config_path: Path, overrides: Sequence[str], *, run_dir: Path | None, overwrite: bool) -> int:
    """Exit status of the run: 0, or 130 after a second Ctrl-C.

    Raises:
        UserError: something is wrong that can be told before anything starts, or a worker found it.
        RunFailed: the run could not go on.
    """
    config = preflight(config_path, overrides)
    controller_process.prepare(len(expected_workers(config)))
    path = run_dir or Path("runs") / config.name
    directory = RunDirectory.create(path, config, overwrite=overwrite)
    try:
        return _run(config, directory)
    finally:
        directory.close()


def _run(config: ExperimentConfig, directory: RunDirectory) -> int:
    events = EventBus()
    started = time.monotonic()

    def elapsed() -> float:
        return time.monotonic() - started

    directory.record(events, elapsed)
    terminal = Terminal(events, config, run_dir=directory.path, now=elapsed)
    terminal.open()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(LocalRun(config, directory.path, events, terminal).run())
        terminal.finish(outcome)
    except Interrupted:
        terminal.finish("stopped at once by the second Ctrl-C")
        return 130
    finally:
        terminal.close()
    return 0

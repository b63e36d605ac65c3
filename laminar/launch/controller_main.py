"""`python -m laminar.launch.controller_main RUN_DIR DESCRIPTOR`: the controller's process, as the supervisor starts it.

Exit status as that of `laminar train`, and one more, DAMAGED_CHECKPOINT. Everything that it needs is in the run directory.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import uvloop

from laminar.config.load import load_config
from laminar.config.schema import ExperimentConfig
from laminar.errors import DamagedCheckpoint, RunFailed, UserError
from laminar.launch import controller_process
from laminar.launch.commands import expected_workers
from laminar.launch.records import Records
from laminar.launch.run import Interrupted, LocalRun
from laminar.launch.supervised import DAMAGED_CHECKPOINT, SupervisedProcesses
from laminar.observability.events import EventBus
from laminar.observability.run_directory import CONFIG, RunDirectory
from laminar.observability.terminal import Terminal


def main() -> int:
    """One controller's life."""
    run_dir, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    try:
        config = load_config(run_dir / CONFIG)
        controller_process.prepare(len(expected_workers(config)))
        directory = RunDirectory.open(run_dir)
        try:
            return _run(config, directory, descriptor)
        finally:
            directory.close()
    except DamagedCheckpoint as error:
        print(f"laminar: {error}", file=sys.stderr)
        return DAMAGED_CHECKPOINT
    except UserError as error:
        print(f"laminar: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"laminar: the run failed: {error}", file=sys.stderr)
        return 1


def _run(config: ExperimentConfig, directory: RunDirectory, descriptor: int) -> int:
    events = EventBus()
    started = time.monotonic()

    def elapsed() -> float:
        return time.monotonic() - started

    directory.record(events, elapsed)
    terminal = Terminal(events, config, run_dir=directory.path, now=elapsed)
    terminal.open()

    async def run() -> str:
        processes = await SupervisedProcesses.connect(directory.path, descriptor, _end_at_once)
        records = Records(directory.path)
        run = LocalRun(config, directory.path, events, terminal, processes, records, run_id=records.run_id)
        return await run.run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(run())
        terminal.finish(outcome)
    except Interrupted:
        terminal.finish("stopped at once by the second Ctrl-C")
        return 130
    finally:
        terminal.close()
    return 0


def _end_at_once() -> None:
    """The supervisor's process has ended, and the kernel is about to end this one: workers that were started by hand must hear
    nothing of an end in between, for they wait for another controller.
    """
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())

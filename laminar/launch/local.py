"""Starts, watches and stops the processes of a run on this machine.

Invariants: every process started here is watched by a task; after `stop` none of them nor of their children is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from laminar.launch.commands import Command
from laminar.protocol.connection import RUN_ID_VARIABLE

LOG_TAIL_LINES = 15


@dataclass(kw_only=True, slots=True)
class _Running:
    command: Command
    process: asyncio.subprocess.Process
    watch: asyncio.Task[None]


class LocalLauncher:
    """Child processes in sessions of their own (a Ctrl-C in the terminal reaches the controller only)."""

    def __init__(self, run_dir: Path, run_id: str, on_exit: Callable[[Command, int], None]) -> None:
        """`on_exit` hears of every process that ends before it was told to."""
        self._log_dir = run_dir / "logs"
        self._run_id = run_id
        self._on_exit = on_exit
        self._running: dict[str, _Running] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, command: Command) -> int:
        """Start a process; its output goes to `logs/<name>.log`. Returns its pid."""
        log = os.open(self._log_dir / f"{command.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "laminar.launch.child",
                    str(os.getpid()),
                    str(int(signal.SIGTERM)),
                    *command.argv,
                ),
                env={**os.environ, **command.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        watch = asyncio.create_task(self._watch(command, process), name=f"watch {command.name}")
        self._running[command.name] = _Running(command=command, process=process, watch=watch)
        return process.pid

    def living(self) -> dict[str, int]:
        """Processes that run, by the names of their commands."""
        return {name: running.process.pid for name, running in self._running.items()}

    def owns(self, pid: int) -> bool:
        """Whether this process was started here, so that `on_exit` will tell of its end."""
        return any(running.process.pid == pid for running in self._running.values())

    def kill(self, name: str) -> None:
        """SIGKILL a process and its group, without a report to `on_exit`."""
        running = self._running.pop(name, None)
        if running is not None:
            running.watch.cancel()
            _signal_group(running.process.pid, signal.SIGKILL)

    async def stop(self, limit_s: float, hurry: asyncio.Event | None = None) -> list[str]:
        """Wait for all processes to end by themselves, then SIGTERM, then SIGKILL, each after `limit_s`.

        `hurry` cuts the first of the three short.

        Returns the names of those that had to be signalled. Processes of this run that escaped their groups are killed.
        """
        forced: list[str] = []
        running = list(self._running.values())
        for entry in running:
            entry.watch.cancel()
        self._running.clear()
        waits = {asyncio.create_task(entry.process.wait(), name=entry.command.name): entry for entry in running}
        pending = set(waits)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if not pending:
                break
            if number is not None:
                for task in pending:
                    _signal_group(waits[task].process.pid, number)
                forced += [task.get_name() for task in pending if task.get_name() not in forced]
            await _ended_or(hurry if number is None else None, pending, limit_s)
            pending = {task for task in pending if not task.done()}
        for entry in running:
            _signal_group(entry.process.pid, signal.SIGKILL)  # what a dead group leader left behind
        for pid in processes_of_run(self._run_id):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return forced

    def log_tail(self, names: Iterable[str]) -> str:
        """Last lines of the logs of processes: what a person needs when they have died."""
        return log_tail(self._log_dir, names)

    async def _watch(self, command: Command, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        self._running.pop(command.name, None)
        _signal_group(process.pid, signal.SIGKILL)
        try:
            self._on_exit(command, status)
        except Exception as error:  # ends the run: the controller awaits `failure`
            if not self.failure.done():
                self.failure.set_exception(error)


async def _ended_or(event: asyncio.Event | None, tasks: set[asyncio.Task[int]], limit_s: float) -> None:
    """Wait until all tasks are done, the event is set, or the limit has passed."""
    waits: set[asyncio.Task[object]] = {asyncio.create_task(asyncio.wait(tasks), name="processes end")}
    if event is not None:
        waits.add(asyncio.create_task(event.wait(), name="hurry"))
    await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def log_tail(log_dir: Path, names: Iterable[str]) -> str:
    """Last lines of the logs of processes."""
    parts = []
    for name in dict.fromkeys(names):
        path = log_dir / f"{name}.log"
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
            if lines:
                parts.append(f"--- {path}\n" + "\n".join(lines))
    return "\n".join(parts)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def processes_of_run(run_id: str) -> list[int]:
    """Processes of this machine whose environment names the run."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and is_of_run(int(entry.name), run_id)
    ]


def is_of_run(pid: int, run_id: str) -> bool:
    """Whether there is such a process, and its environment names the run."""
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    try:
        return marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False

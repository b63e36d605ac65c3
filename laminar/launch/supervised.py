"""The controller's end of the line to its supervisor, which starts, watches and stops the run's processes for it.

Invariant: every process that was asked for and ends unasked is told to `on_exit`; what that raises becomes `failure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laminar.errors import RunFailed
from laminar.launch.commands import Command
from laminar.launch.local import log_tail

# Exit status of a controller: the trainer cannot go back to the newest checkpoint, perhaps to an older one.
DAMAGED_CHECKPOINT = 3
START_LIMIT_S = 30.0  # to start a process


class SupervisedProcesses:
    """Starts and stops processes by way of the supervisor. Use `connect`."""

    def __init__(self, run_dir: Path, writer: asyncio.StreamWriter, first: dict[str, Any]) -> None:
        self.supervisor_pid: int = first["supervisor"]
        self.living: dict[str, int] = first["living"]  # commands that an earlier controller had started, by name
        # Hears of every process that ends before it was told to.
        self.on_exit: Callable[[Command, int], None] = lambda command, status: None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log_dir = run_dir / "logs"
        self._writer = writer
        self._commands: dict[str, Command] = {}
        self._pids = dict(self.living)
        self._starting: asyncio.Future[int] | None = None
        self._stopped: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._listening: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @classmethod
    async def connect(cls, run_dir: Path, descriptor: int, gone: Callable[[], None]) -> SupervisedProcesses:
        """Over the socket that this process has inherited. `gone` is called when the supervisor's process has ended."""
        reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor), limit=1 << 24)
        processes = cls(run_dir, writer, json.loads(await reader.readline()))
        processes._listening = asyncio.create_task(processes._listen(reader, gone), name="notices of the supervisor")
        return processes

    def adopt(self, commands: Iterable[Command]) -> None:
        """What the living processes are, so that their ends can be told."""
        for command in commands:
            if command.name in self._pids:
                self._commands[command.name] = command

    async def start(self, command: Command) -> int:
        """Start a process; its output goes to `logs/<name>.log`. Returns its pid. Raises RunFailed if it cannot be started."""
        async with self._turn:
            self._starting = asyncio.get_running_loop().create_future()
            self._commands[command.name] = command
            self._ask({"do": "start", "command": asdict(command)})
            async with asyncio.timeout(START_LIMIT_S):
                return await self._starting

    def owns(self, pid: int) -> bool:
        """Whether `on_exit` will tell of this process's end."""
        return pid in self._pids.values()

    def kill(self, name: str) -> None:
        """SIGKILL a process and its group, without a report to `on_exit`."""
        self._pids.pop(name, None)
        self._ask({"do": "kill", "name": name})

    async def stop(self, limit_s: float, hurry: asyncio.Event) -> list[str]:
        """Have all processes end: by themselves, then SIGTERM, then SIGKILL, each after `limit_s`; `hurry` cuts the first short.

        Returns the names of those that had to be signalled.
        """
        self._ask({"do": "stop", "limit_s": limit_s})
        hurrying = asyncio.create_task(self._hurry(hurry), name="hurry")
        try:
            async with asyncio.timeout(4 * limit_s):
                return await self._stopped
        finally:
            hurrying.cancel()

    async def _hurry(self, hurry: asyncio.Event) -> None:
        await hurry.wait()
        self._ask({"do": "hurry"})

    def log_tail(self, names: Iterable[str]) -> str:
        """Last lines of the logs of processes: what a person needs when they have died."""
        return log_tail(self._log_dir, names)

    async def _listen(self, reader: asyncio.StreamReader, gone: Callable[[], None]) -> None:
        with contextlib.suppress(ConnectionError):  # it ended before it had read all
            while line := await reader.readline():
                notice: dict[str, Any] = json.loads(line)
                if "started" in notice:
                    self._pids[notice["started"]] = notice["pid"]
                    if self._starting is not None and not self._starting.done():
                        self._starting.set_result(notice["pid"])
                elif "failed" in notice:
                    if self._starting is not None and not self._starting.done():
                        error = RunFailed(f"{notice['failed']} could not be started: {notice['error']}")
                        self._starting.set_exception(error)
                elif "ended" in notice:
                    self._ended(notice["ended"], notice["status"])
                elif not self._stopped.done():
                    self._stopped.set_result(notice["stopped"])
        gone()

    def _ended(self, name: str, status: int) -> None:
        self._pids.pop(name, None)
        try:
            self.on_exit(self._commands[name], status)
        except Exception as error:  # ends the run: whoever runs it awaits `failure`
            if not self.failure.done():
                self.failure.set_exception(error)

    def _ask(self, request: dict[str, Any]) -> None:
        self._writer.write(json.dumps(request).encode() + b"\n")

"""The processes of a run without a supervisor: this very process owns them.

For an evaluation alone, which is begun anew rather than gone on with. Invariant: the same as `LocalLauncher`'s.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from laminar.launch.commands import Command
from laminar.launch.local import LocalLauncher


class OwnProcesses:
    """What `SupervisedProcesses` is to a controller that may be replaced; make it inside the loop."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self.supervisor_pid = os.getpid()
        self.living: dict[str, int] = {}  # nobody was here before
        self.on_exit: Callable[[Command, int], None] = lambda command, status: None
        self._launcher = LocalLauncher(run_dir, run_id, lambda command, status: self.on_exit(command, status))

    @property
    def failure(self) -> asyncio.Future[None]:
        """What `on_exit` has raised."""
        return self._launcher.failure

    def adopt(self, commands: Iterable[Command]) -> None:
        """There is nothing to adopt."""

    async def start(self, command: Command) -> int:
        """Start a process; its output goes to `logs/<name>.log`. Returns its pid."""
        return await self._launcher.start(command)

    def owns(self, pid: int) -> bool:
        """Whether `on_exit` will tell of this process's end."""
        return self._launcher.owns(pid)

    def kill(self, name: str) -> None:
        """SIGKILL a process and its group, without a report to `on_exit`."""
        self._launcher.kill(name)

    async def stop(self, limit_s: float, hurry: asyncio.Event) -> list[str]:
        """See `LocalLauncher.stop`."""
        return await self._launcher.stop(limit_s, hurry)

    def log_tail(self, names: Iterable[str]) -> str:
        """Last lines of the logs of processes."""
        return self._launcher.log_tail(names)

"""The process that a person starts: it owns all processes of a run, and starts the controller again when that is killed.

  laminar train --> [ supervisor ] --spawns--> controller, torchrun, mpirun, rollouts, environment workers
                    [            ] <--JSON lines over a socket pair--> controller (`supervised.py`)

Invariants: however the run ends, afterwards no process of it, no file in shared memory and no port is left. If this very process
is killed, the kernel ends all that it has started, and the next start removes what is left in shared memory; only workers that
were started by hand then wait for a `--resume`, with what they have in shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.controller.fleet_health import FAILURE_WINDOW_S
from laminar.launch.commands import Command, mpi_directory
from laminar.launch.local import LocalLauncher, processes_of_run
from laminar.launch.supervised import DAMAGED_CHECKPOINT
from laminar.protocol.connection import CONNECTION_FILE
from laminar.weights import run_memory

END_LIMIT_S = 10.0  # for workers to end by themselves; then SIGTERM, then SIGKILL
LOOK_S = 0.05  # between two looks at processes that have been killed


class Supervisor:
    """Of one run; use `run` once."""

    def __init__(
        self, config: ExperimentConfig, run_dir: Path, run_id: str, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`now`: a clock, in seconds."""
        self._now = now
        self._run_dir = run_dir
        self._run_id = run_id
        self._restarts = config.controller.restarts
        self._killed: list[float] = []  # when controllers were, within FAILURE_WINDOW_S
        self._by_hand = "manual" in config.launch.model_dump().values()
        self._launcher: LocalLauncher
        self._controller: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None  # to it
        self._hurry = asyncio.Event()
        self._stopping = False  # the person has asked for it

    async def run(self) -> int:
        """Exit status of the run; or DAMAGED_CHECKPOINT: it may go on from an older one."""
        left = run_memory.remove_leftovers(but=self._run_id)
        for name in left:
            _say(f"removed {name} from shared memory: left by a run that died")
        await self._claim()
        self._launcher = LocalLauncher(self._run_dir, self._run_id, self._on_exit)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):  # stays to the very end: nothing may cut the clean-up short
            loop.add_signal_handler(number, self._forward, number)
        try:
            while True:
                status = await self._one_controller()
                if status >= 0:
                    return 2 if status == DAMAGED_CHECKPOINT and self._stopping else status
                name = signal.Signals(-status).name
                now = self._now()
                self._killed = [when for when in self._killed if now - when < FAILURE_WINDOW_S] + [now]
                if self._stopping or len(self._killed) > self._restarts:
                    why = "as asked" if self._stopping else "controller.restarts, for an hour, is used up"
                    _say(f"warning: the controller was killed ({name}) and is not started again: {why}")
                    _say(f"laminar train --resume {self._run_dir} goes on with the run")
                    return 1
                _say(f"warning: the controller was killed ({name}); starting it again, the workers go on meanwhile")
        finally:
            self._stopping = True
            self._hurry.set()  # the controller has told the workers to end, or nobody will
            await self._launcher.stop(END_LIMIT_S, self._hurry)
            (self._run_dir / CONNECTION_FILE).unlink(missing_ok=True)
            run_memory.remove(self._run_id)

    async def _claim(self) -> None:
        """The run's folder in shared memory, with what workers that were started by hand still have there.

        What an earlier supervisor had started is about to end, since that is dead; it ends here, so that nothing of it is in
        the way of those that take its place.
        """
        deadline = asyncio.get_running_loop().time() + END_LIMIT_S  # a device may hold one longer
        while (left := processes_of_run(self._run_id)) and asyncio.get_running_loop().time() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(LOOK_S)
        if self._by_hand:
            run_memory.take_over(self._run_id)
        else:
            run_memory.claim(self._run_id)
        mpi_directory(self._run_id).mkdir(mode=0o700, exist_ok=True)

    async def _one_controller(self) -> int:
        """Exit status of one controller's process; negative if a signal ended it."""
        ours, theirs = socket.socketpair()
        child = (sys.executable, "-m", "laminar.launch.child", str(os.getpid()), str(int(signal.SIGKILL)))
        main = (sys.executable, "-m", "laminar.launch.controller_main", str(self._run_dir), str(theirs.fileno()))
        self._controller = await asyncio.create_subprocess_exec(
            *child, *main, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 24)
        self._tell({"living": self._launcher.living(), "supervisor": os.getpid()})
        serve = asyncio.create_task(self._serve(reader), name="requests of the controller")
        ended = asyncio.create_task(self._controller.wait(), name="end of the controller")
        try:
            done, _ = await asyncio.wait([serve, ended], return_when=asyncio.FIRST_COMPLETED)
            if serve in done:
                serve.result()  # nobody would do what it asks for
            return await ended
        finally:
            for task in (serve, ended):
                task.cancel()
            await asyncio.gather(serve, ended, return_exceptions=True)
            if self._controller.returncode is None:
                self._controller.kill()
            self._writer.close()
            self._writer = None

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        """Requests in their order; a stop may be hurried meanwhile."""
        stopping: asyncio.Task[None] | None = None
        try:
            while line := await reader.readline():
                request: dict[str, Any] = json.loads(line)
                match request["do"]:
                    case "start":
                        await self._start(_command(request["command"]))
                    case "kill":
                        self._launcher.kill(request["name"])
                    case "hurry":
                        self._hurry.set()
                    case "stop":
                        stopping = asyncio.create_task(self._stop(request["limit_s"]), name="stop")
        except ConnectionError:
            pass  # the controller's process has ended
        finally:
            if stopping is not None:  # whatever has become of who asked for it
                await stopping

    async def _start(self, command: Command) -> None:
        try:
            pid = await self._launcher.start(command)
        except OSError as error:
            self._tell({"failed": command.name, "error": str(error)})
        else:
            self._tell({"started": command.name, "pid": pid})

    async def _stop(self, limit_s: float) -> None:
        forced = await self._launcher.stop(limit_s, self._hurry)
        self._tell({"stopped": forced})

    def _on_exit(self, command: Command, status: int) -> None:
        self._tell({"ended": command.name, "status": status})

    def _tell(self, notice: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(notice).encode() + b"\n")

    def _forward(self, number: int) -> None:
        """What the person asks for, to the controller: it has a session of its own, so a Ctrl-C reaches this process only."""
        self._stopping = True
        if self._controller is not None and self._controller.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._controller.send_signal(number)
        else:
            self._hurry.set()


def _command(fields: dict[str, Any]) -> Command:
    return Command(
        name=fields["name"],
        argv=tuple(fields["argv"]),
        environment=fields["environment"],
        workers=tuple(fields["workers"]),
    )


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, flush=True)

"""A real `laminar train` as a child process, followed by the event file that it writes, and struck by signals.

Invariant: all times are this process's own, taken when a line is seen; so they are a few milliseconds late, never early.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_accounts import Line

from laminar.protocol.connection import CONNECTION_FILE

END_S = 15.0  # that a run which is broken off may take for each step of its end
LOOK_S = 0.01  # between two looks at the event file


@dataclass(kw_only=True, slots=True)
class Seen:
    """A line of events.jsonl, and when it was there."""

    at: float  # time.perf_counter
    line: Line


@dataclass(kw_only=True, slots=True)
class ChaosRun:
    """Use as a context manager."""

    config: Path
    run_dir: Path
    settings: tuple[str, ...]
    seen: list[Seen] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)  # newest process of each worker
    well: dict[str, bool] = field(default_factory=dict)  # workers that are ready (rollouts: that serve weights)
    publishes: int = 0
    _read: int = 0  # bytes of the event file
    _process: asyncio.subprocess.Process | None = None
    _follower: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> ChaosRun:
        command = [sys.executable, "-m", "laminar", "train", str(self.config), "--run-dir", str(self.run_dir)]
        for setting in self.settings:
            command += ["--set", setting]
        self.run_dir.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, start_new_session=True
            )
        finally:
            os.close(output)
        self._follower = asyncio.create_task(self._follow(), name="follow the event file")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        if self._process is None:
            return
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):  # the second ends it at once
            if self._process.returncode is not None:
                return
            self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._process.wait()

    @property
    def _output(self) -> Path:
        return self.run_dir.parent / f"{self.run_dir.name}.txt"

    def ended(self) -> bool:
        """Whether `laminar train` has ended."""
        return self._process is not None and self._process.returncode is not None

    @property
    def controller_pid(self) -> int:
        """Process of the controller, as its workers know it."""
        return int(json.loads((self.run_dir / CONNECTION_FILE).read_text(encoding="utf-8"))["controller_pid"])

    def output(self) -> str:
        """What it printed."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    async def until(self, condition: Callable[[], bool], limit_s: float, what: str) -> float:
        """Wait until it holds, or the run has ended; returns when. Raises TimeoutError that says what was awaited."""
        try:
            async with asyncio.timeout(limit_s):
                while not self.ended() and not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"{self.run_dir}: waited {limit_s:g} s for {what}; the end of its output:\n{self.output()[-3000:]}"
            ) from None
        return time.perf_counter()

    async def end(self, limit_s: float) -> int:
        """Exit status. Raises TimeoutError."""
        assert self._process is not None
        await self.until(lambda: False, limit_s, "its end")
        return int(self._process.returncode or 0)

    def strike(self, pid: int, number: signal.Signals) -> float:
        """Send a signal; returns when."""
        now = time.perf_counter()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return now

    def first(self, since: float, matches: Callable[[Line], bool]) -> Seen | None:
        """The first line that was seen after a moment and matches."""
        return next((seen for seen in self.seen if seen.at >= since and matches(seen.line)), None)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._read_on()
            self._changed.set()

    def _read_on(self) -> None:
        path = self.run_dir / "events.jsonl"
        if not path.exists() or path.stat().st_size == self._read:
            return
        with open(path, "rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, line: Line) -> None:
        self.seen.append(Seen(at=time.perf_counter(), line=line))
        match line["event"]:
            case "WeightsPublished":
                self.publishes += 1
            case "WorkerJoined":
                self.pids[line["worker"]] = line["pid"]
                self.well[line["worker"]] = False
            case "WorkerReady":
                self.well[line["worker"]] = not line["worker"].startswith("rollout")
            case "WeightsPulled":
                self.well[line["rollout"]] = True
            case "RolloutLost":
                self.well[line["rollout"]] = False


def notice_of(*texts: str) -> Callable[[Line], bool]:
    """Matches a notice that holds all of these."""
    return lambda line: line["event"] == "Notice" and all(text in line["text"] for text in texts)


def event_of(kind: str, **values: Any) -> Callable[[Line], bool]:
    """Matches an event of this kind with these values."""
    return lambda line: line["event"] == kind and all(line.get(key) == value for key, value in values.items())

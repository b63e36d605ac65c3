"""How late an event loop is, and how much of that is the machine's: other processes that had the CPU."""

from __future__ import annotations

import asyncio
import os
import time

LAG_INTERVAL_S = 0.005


class CpuWait:
    """Seconds for which this thread was ready to run and the machine ran something else; 0 where Linux does not say."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Since the start of the thread."""
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9 if self._file >= 0 else 0.0


class LoopLag:
    """How late the loop wakes a coroutine that sleeps for 5 ms."""

    def __init__(self) -> None:
        self.cpu_wait = CpuWait()
        self.late_s: list[float] = []
        self.own_s: list[float] = []  # less what the thread waited for a CPU meanwhile

    async def watch_forever(self) -> None:
        """Sample until cancelled. Not by the loop's own clock: uvloop reads it once per round, in whole milliseconds."""
        while True:
            waited, due = self.cpu_wait.seconds(), time.perf_counter() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            late = max(0.0, time.perf_counter() - due)
            self.late_s.append(late)
            self.own_s.append(max(0.0, late - (self.cpu_wait.seconds() - waited)))

    def clear(self) -> None:
        """Begin anew."""
        self.late_s.clear()
        self.own_s.clear()

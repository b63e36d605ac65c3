"""Runs many fault schedules in several processes; shrinks what fails, and says how to replay it.

Invariant: a seed gives the same run in every process; what is reported for it can be had again by `replay`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from laminar.simulation.faults.draw_schedule import draw_schedule
from laminar.simulation.faults.fault_schedule import FaultSchedule
from laminar.simulation.faults.run_schedule import FaultRun, run_schedule
from laminar.simulation.faults.shrink import shrink

CHUNK = 8  # seeds handed to a process at once


@dataclass(kw_only=True, slots=True)
class ExploreResult:
    """What came of many seeds."""

    runs: int = 0
    violations: list[FaultRun] = field(default_factory=list)  # by seed
    strikes: Counter[str] = field(default_factory=Counter)  # faults that struck, by kind
    schedules: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)  # events of the controllers, by type
    virtual_s: float = 0.0

    def add(self, run: FaultRun) -> None:
        """Count a run."""
        self.runs += 1
        self.strikes.update(run.strikes)
        self.schedules[run.schedule_name] += 1
        self.happened.update(run.happened)
        self.virtual_s += run.virtual_s
        if run.violated:
            self.violations.append(run)
        self.endings[f"VIOLATION: {run.violated}" if run.violated else run.report] += 1


def explore(
    seeds: range, *, processes: int | None = None, progress: Callable[[FaultRun], None] = lambda run: None
) -> ExploreResult:
    """Run the fault schedules of these seeds.

    Args:
        processes: None: one for each core that this process may use; 1: in this one.
        progress: called after each run, in the order of the seeds.
    """
    result = ExploreResult()
    for run in _runs(seeds, processes or len(os.sched_getaffinity(0))):
        result.add(run)
        progress(run)
    result.violations.sort(key=lambda run: run.seed)
    return result


def replay(seed: int) -> FaultRun:
    """The run of one seed, with every line of its event log."""
    return run_schedule(draw_schedule(seed), keep_log=True)


def shortest_failure(run: FaultRun) -> tuple[FaultSchedule, FaultRun]:
    """The smallest schedule found that violates the same invariant as this run's seed does, and its run with its whole log."""

    def fails(candidate: FaultSchedule) -> bool:
        return run_schedule(candidate).violated == run.violated

    smallest = shrink(draw_schedule(run.seed), fails)
    return smallest, run_schedule(smallest, keep_log=True)


def _runs(seeds: range, processes: int) -> Iterator[FaultRun]:
    if processes == 1:
        for seed in seeds:
            yield run_schedule(draw_schedule(seed))
        return
    # Not forked: this process may have threads (the progress bar's).
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        chunks = iter([seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)])
        pending: deque[Future[list[FaultRun]]] = deque()
        try:
            while True:
                pending.extend(pool.submit(_run_chunk, chunk) for chunk in islice(chunks, 3 * processes - len(pending)))
                if not pending:
                    return
                yield from pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _run_chunk(seeds: Iterable[int]) -> list[FaultRun]:
    return [run_schedule(draw_schedule(seed)) for seed in seeds]

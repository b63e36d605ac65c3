"""Runs the cases of a study, in this process or in several.

Invariant: every case has its own clock and random numbers, so the figures are the same whatever the number of processes and
whoever finishes first; only `host_s`, the simulator's own time, differs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue

from laminar.observability.events import StepFinished
from laminar.simulation.cluster import RunOptions, SimulatedRun
from laminar.simulation.records.record import RunRecord
from laminar.simulation.study.assumptions import assumptions
from laminar.simulation.study.config import SimulationConfig
from laminar.simulation.study.plan import PlannedCase, plan_cases
from laminar.simulation.study.study_result import Case, StudyResult

POLL_S = 0.1  # how often the progress of other processes is looked at


@dataclass(kw_only=True, slots=True, frozen=True)
class Progress:
    """A case has made a step."""

    case: int  # its place among the cases
    step: int
    time_s: float  # on the cluster's clock


Show = Callable[[Progress], None]
_queue: SimpleQueue[Progress] | None = None  # of a process that runs cases


def run_study(
    config: SimulationConfig, cases: Sequence[PlannedCase], *, processes: int = 1, show: Show = lambda _: None
) -> StudyResult:
    """Run all cases and put their records together.

    Args:
        cases: what `plan_cases` made of the config.
        processes: how many run at the same time; 1 runs them here.
        show: told of every step.
    """
    workers = min(processes, len(cases))
    options = RunOptions(warm_up_steps=config.warm_up_steps, cool_down_steps=config.cool_down_steps)
    run = _run_here if workers <= 1 else _run_in_processes
    records = run(cases, options, config.seed, workers, show)
    return StudyResult(
        name=config.name,
        description=config.description or _description(config),
        assumptions=assumptions(config, list(cases)),
        cases=[_case(config, case, record) for case, record in zip(cases, records, strict=True)],
    )


def simulate(config: SimulationConfig, *, processes: int = 1, show: Show = lambda _: None) -> StudyResult:
    """Plan and run a study.

    Raises:
        UserError: a case is impossible; nothing has run then.
    """
    return run_study(config, plan_cases(config), processes=processes, show=show)


def _run_here(
    cases: Sequence[PlannedCase], options: RunOptions, seed: int, workers: int, show: Show
) -> list[RunRecord]:
    return [_run_case(k, case, options, seed, show) for k, case in enumerate(cases)]


def _run_in_processes(
    cases: Sequence[PlannedCase], options: RunOptions, seed: int, workers: int, show: Show
) -> list[RunRecord]:
    # Spawned, not forked: the terminal's progress display runs in a thread.
    context = multiprocessing.get_context("spawn")
    queue: SimpleQueue[Progress] = context.SimpleQueue()
    # Those that take longest go first, so that no process ends up alone with one.
    order = sorted(range(len(cases)), key=lambda k: -cases[k].models.gpus)
    with ProcessPoolExecutor(workers, context, _start_process, (queue,)) as pool, _ended_on_error(pool):
        futures = {k: pool.submit(_run_case_there, k, cases[k], options, seed) for k in order}
        pending = set(futures.values())
        while pending:
            done, pending = wait(pending, POLL_S, FIRST_COMPLETED)
            while not queue.empty():
                show(queue.get())
            for future in done:
                future.result()  # raises what it raised
        return [futures[k].result() for k in range(len(cases))]


@contextmanager
def _ended_on_error(pool: ProcessPoolExecutor) -> Iterator[None]:
    """Whatever ends the study early, Ctrl-C as well, ends its processes."""
    others = multiprocessing.active_children()
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        own = [process for process in multiprocessing.active_children() if process not in others]
        for process in own:
            process.terminate()
        for process in own:
            process.join()
        raise


def _start_process(queue: SimpleQueue[Progress]) -> None:
    global _queue
    _queue = queue
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C reaches all of a terminal's processes: end without a traceback
    os.environ["OMP_NUM_THREADS"] = "1"


def _run_case_there(k: int, case: PlannedCase, options: RunOptions, seed: int) -> RunRecord:
    assert _queue is not None
    return _run_case(k, case, options, seed, _queue.put)


def _run_case(k: int, case: PlannedCase, options: RunOptions, seed: int, show: Show) -> RunRecord:
    def on_step(event: StepFinished) -> None:
        show(Progress(case=k, step=event.step, time_s=asyncio.get_running_loop().time()))

    run = SimulatedRun(case.experiment, case.models, seed=seed, options=options)
    run.events.subscribe(on_step, StepFinished)
    return run.run()


def _case(config: SimulationConfig, case: PlannedCase, record: RunRecord) -> Case:
    experiment = case.experiment
    return Case(
        model=case.models.model.name,
        gpus=case.models.gpus,
        rollout_gpus=case.split.rollout_gpus,
        trainer_gpus=case.split.trainer_gpus,
        tensor_parallel=case.models.tensor_parallel,
        relays=experiment.relay.count,
        workload=config.workload.name,
        schedule=case.label,
        repack=experiment.repack.enabled,
        record=record,
    )


def _description(config: SimulationConfig) -> str:
    batch = config.batch
    return (
        f"Batches of {batch.groups_per_step * batch.group_size} trajectories ({batch.groups_per_step} groups x "
        f"{batch.group_size}), {config.steps} steps, workload {config.workload.name}."
    )

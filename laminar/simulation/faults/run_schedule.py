"""Makes one fault schedule's run: the real controller, modelled workers, faults, and every invariant checked.

Invariant: the outcome, log and digest depend on the schedule alone.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from laminar.simulation.channels.network import jittered_latency
from laminar.simulation.cluster import RunOptions, SimulatedRun
from laminar.simulation.cluster_models import ClusterModels
from laminar.simulation.faults.event_log import EventLog
from laminar.simulation.faults.fault import kind_of
from laminar.simulation.faults.fault_schedule import FaultSchedule, WorkloadFigures
from laminar.simulation.faults.injector import Injector
from laminar.simulation.faults.invariants.invariant import InvariantViolation
from laminar.simulation.faults.invariants.monitor import Monitor
from laminar.simulation.models.hardware import Constants, gpu
from laminar.simulation.models.language_models import language_model
from laminar.simulation.models.lengths import LogNormalLengths
from laminar.simulation.models.workload import ToolCalls, Workload
from laminar.simulation.workers.environment_worker import RewardModel

LIMIT_S = 5_000.0  # virtual seconds; ten times what the longest takes


@dataclass(kw_only=True, slots=True, frozen=True)
class FaultRun:
    """What came of one schedule."""

    seed: int
    schedule_name: str
    violated: str  # name of the invariant; empty if all held
    report: str  # how it ended; with a violation its values and the last events
    digest: str  # of the event log
    log: str  # all lines if they were asked for, else the last
    strikes: Counter[str]  # faults that struck, by kind
    happened: Counter[str]  # events of the controller, by type
    lines: int  # of the log
    virtual_s: float


# Slow hardware, so that short responses, small batches and one version's weights all take about as long as an outage.
SLOW = Constants(
    decode_bandwidth_share=0.15,  # some 30 ms a token
    training_flops_share=0.03,  # some seconds a step
    nic_bandwidth=1.5e10,  # half a second a broadcast
    storage_bandwidth=1e11,  # a second a checkpoint
)
TOOL_LIMIT_S = 8.0  # below the environment's own limit, with the latency of messages
TRAINER_GPUS = 4  # the fewest that hold the model's training state


def run_schedule(schedule: FaultSchedule, *, keep_log: bool = False) -> FaultRun:
    """Make the run and judge it. Never raises because of what the controller does."""
    log = EventLog(keep_all=keep_log)
    injector = Injector(schedule.faults, log)
    monitor = Monitor(schedule, injector, log)
    clock = _Clock()

    def before(run: SimulatedRun) -> None:
        clock.now = run.network._wire.loop.time
        monitor.attach(run)
        injector.attach(run)

    failure: BaseException | None = None
    try:
        _simulated_run(schedule, before).run(LIMIT_S)
    except Exception as error:  # whatever ended the run is judged below
        failure = error
    violated, report = "", ""
    try:
        report = monitor.judge(failure)
    except InvariantViolation as violation:
        violated = violation.invariant
        report = f"at {clock.now():.6f} s: {violation}"
    log.note(clock.now(), report)
    return FaultRun(
        seed=schedule.seed,
        schedule_name=schedule.config.schedule.name,
        violated=violated,
        report=report,
        digest=log.digest,
        log=log.text(),
        strikes=Counter(kind_of(strike.fault) for strike in injector.strikes),
        happened=monitor.happened,
        lines=log.count,
        virtual_s=clock.now(),
    )


class _Clock:
    """The run's; it can be read when the loop is closed too."""

    def __init__(self) -> None:
        self.now = lambda: 0.0


def _tools(figures: WorkloadFigures) -> ToolCalls | None:
    if not figures.tool_calls:
        return None
    return ToolCalls(
        minimum=0,
        maximum=figures.tool_calls,
        latency_median_s=figures.tool_s,
        latency_p99_s=4 * figures.tool_s,
        latency_limit_s=TOOL_LIMIT_S,
    )


def _simulated_run(schedule: FaultSchedule, before: object) -> SimulatedRun:
    figures, config = schedule.workload, schedule.config
    lengths = LogNormalLengths(
        median=figures.response_tokens,
        p99=figures.response_tokens_p99,
        maximum=config.rollout.max_response_tokens,
    )
    workload = Workload(
        lengths=lengths,
        prompt_lengths=LogNormalLengths(
            median=figures.prompt_tokens, p99=figures.prompt_tokens_p99, maximum=2 * config.data.max_prompt_tokens
        ),
        group_size=config.trainer.group_size,
        groups_per_step=config.trainer.groups_per_step,
        seed=figures.seed,
        tools=_tools(figures),
    )
    latency = jittered_latency(figures.latency_s, figures.latency_jitter_s, random.Random(figures.seed))
    return SimulatedRun(
        config,
        ClusterModels(
            model=language_model("Qwen2.5-7B"),
            gpu=gpu("H800"),
            tensor_parallel=1,
            trainer_gpus=TRAINER_GPUS,
            gpus=TRAINER_GPUS + config.rollout.replicas,
            workload=workload,
            rewards=RewardModel(latency_s=0.02, tail_s=0.1),
            constants=SLOW,
            kv_capacity_tokens=6 * (2 * config.data.max_prompt_tokens + config.rollout.max_response_tokens) // 2,
        ),
        seed=schedule.seed,
        options=RunOptions(
            heartbeats=True,
            latency_s=latency,
            through_codec=True,
            restart_s=3.0,
            journal_s=0.02,
            prompts=figures.prompts,
        ),
        before=before,  # type: ignore[arg-type]
    )

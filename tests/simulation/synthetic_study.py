"""Made-up records and a study of them, for the tests of the reports."""

from __future__ import annotations

import dataclasses
import math

from laminar.simulation.records.record import Lane, RepackFigures, RunRecord, Span, Spread, StepRecord, WeightFigures
from laminar.simulation.study.study_result import Assumption, Case, StudyResult

RATE = {"synchronous": 1.0, "one_step": 1.3, "stream": 1.35, "partial": 1.9, "laminar": 2.5}
IDLE = {
    "synchronous": {"generating": 0.4, "long_tail": 0.25, "batch": 0.15, "weights": 0.02, "training": 0.18},
    "one_step": {"generating": 0.5, "long_tail": 0.15, "batch": 0.1, "training": 0.15, "trajectories": 0.1},
    "stream": {"generating": 0.5, "long_tail": 0.15, "batch": 0.08, "training": 0.2, "trajectories": 0.07},
    "partial": {"generating": 0.6, "pulling": 0.08, "training": 0.25, "trajectories": 0.07},
    "laminar": {"generating": 0.65, "long_tail": 0.05, "training": 0.27, "trainer": 0.02, "trajectories": 0.01},
}


def record(schedule: str = "laminar", *, gpus: int = 64, scale: float = 1.0, repack: bool = True) -> RunRecord:
    """A record that looks like one of this schedule."""
    rate = 1000.0 * gpus**0.9 * RATE[schedule] * scale * (1.0 if repack or schedule != "laminar" else 0.8)
    step_s = 8192 * 6000 / rate
    staleness = {
        "synchronous": {0: 8192},
        "one_step": {1: 8192},
        "stream": {1: 8192},
        "partial": {0: 800, 1: 4000, 2: 2500, 3: 892},
        "laminar": {0: 1500, 1: 4000, 2: 2000, 3: 600, 4: 92},
    }[schedule]
    kv = 0.82 if repack and schedule == "laminar" else 0.7
    return RunRecord(
        steps=[
            StepRecord(
                step=k,
                time_s=round(k * step_s, 3),
                step_s=round(step_s, 3),
                trained_tokens=8192 * 6000,
                staleness=staleness,
            )
            for k in range(1, 11)
        ],
        warm_up_steps=3,
        cool_down_steps=1,
        measured_s=6 * step_s,
        step_s=step_s,
        trained_tokens_per_s=rate,
        generated_tokens_per_s=0.9 * rate,
        gpu_seconds={name: round(share * gpus * 6 * step_s, 1) for name, share in IDLE[schedule].items()},
        trainer_idle_fraction=0.8 if schedule == "synchronous" else 0.1,
        rollout_idle_fraction=0.3 if schedule == "synchronous" else 0.05,
        staleness=staleness,
        mixed_version_fraction=0.4 if schedule == "partial" else 0.0,
        kv_utilization=kv,
        kv_bin_s=step_s / 20,
        kv_bins=[
            round(kv * (0.75 + 0.25 * math.cos(k / (3 if schedule == "synchronous" else 20))), 4) for k in range(200)
        ],
        response_tokens=Spread(mean=5000.0, p50=3000.0, p99=16000.0, max=16384.0),
        trajectory_s=Spread(mean=90.0, p50=60.0, p99=300.0, max=320.0),
        groups_dropped=0,
        weights=WeightFigures(
            publish_stall_s=0.6, broadcast_s=1.2, pulls=96, pull_s=0.8, wait_s=6.0 if schedule == "synchronous" else 3.5
        ),
        repack=RepackFigures(repacks=20, moves=60, trajectories_moved=300, tokens_moved=600_000, overhead_s=0.7)
        if repack and schedule == "laminar"
        else RepackFigures(),
        timeline=timeline(schedule, step_s),
        engine={"preemptions": 12.0},
        host_s=3.5,
        host_events=400_000,
    )


def timeline(schedule: str, step_s: float) -> list[Lane]:
    """A trainer and 16 rollouts over three steps."""
    barrier = schedule != "laminar"
    lanes = [
        Lane(
            name="trainer",
            spans=[
                Span(
                    start_s=(k + (0.8 if barrier else 0.05)) * step_s,
                    end_s=(k + (0.98 if barrier else 0.95)) * step_s,
                    activity="training",
                    policy_version=4 + k,
                    running=512,
                )
                for k in range(3)
            ],
        )
    ]
    for rollout in range(16):
        spans, shift = [], 0.0 if barrier else 0.04 * rollout
        for k in range(3):
            edges = [0.0, 0.3, 0.45, 0.5 + 0.015 * rollout, 0.55 + 0.015 * rollout]
            starts = [(k + shift * (k > 0) + edge) * step_s for edge in edges]
            for start, end, running in zip(starts, starts[1:], (256, 128, 32, 4), strict=False):
                spans.append(
                    Span(start_s=start, end_s=end, activity="generating", policy_version=3 + k, running=running)
                )
            pull = starts[-1] + 0.01 * step_s
            spans.append(Span(start_s=starts[-1], end_s=pull, activity="idle", policy_version=3 + k, running=0))
            spans.append(
                Span(start_s=pull, end_s=pull + 0.02 * step_s, activity="pulling", policy_version=4 + k, running=0)
            )
        lanes.append(Lane(name=f"rollout-{rollout}", spans=spans))
    return lanes


def case(
    schedule: str, *, model: str = "qwen2.5-7b", gpus: int = 64, workload: str = "math", repack: bool | None = None
) -> Case:
    """One case; `repack` defaults to what the schedule runs with."""
    with_repack = schedule == "laminar" if repack is None else repack
    scale = {"qwen2.5-7b": 1.0, "qwen2.5-32b": 0.3, "qwen2.5-72b": 0.12}[model]
    shared = schedule == "synchronous"
    return Case(
        model=model,
        gpus=gpus,
        rollout_gpus=gpus if shared else gpus * 3 // 4,
        trainer_gpus=gpus if shared else gpus // 4,
        tensor_parallel=1,
        relays=gpus // 8,
        workload=workload,
        schedule=schedule,
        repack=with_repack,
        record=record(schedule, gpus=gpus, scale=scale, repack=with_repack),
    )


def study(
    *,
    models: tuple[str, ...] = ("qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b"),
    workloads: tuple[str, ...] = ("math", "tools"),
    sizes: tuple[int, ...] = (64, 256, 1024),
) -> StudyResult:
    """All schedules on all sizes, and `laminar` without repack on the smallest."""
    cases = [
        case(schedule, model=model, gpus=gpus, workload=workload)
        for workload in workloads
        for model in models
        for gpus in sizes
        for schedule in RATE
    ]
    cases += [case("laminar", model=model, gpus=sizes[0], repack=False) for model in models]
    return StudyResult(
        name="paper",
        description="Five schedules on 64 to 1024 H800 GPUs, batch 8192 = 512 prompts x 16.",
        assumptions=[
            Assumption(name="H800 memory bandwidth", value=3.35e12, unit="bytes/s", source="NVIDIA data sheet"),
            Assumption(name="engine", value="roofline", unit="", source="docs/simulation.md"),
        ],
        cases=cases,
    )


def with_rate(one: Case, rate: float, **changes: object) -> Case:
    """The case with another throughput."""
    return dataclasses.replace(one, record=dataclasses.replace(one.record, trained_tokens_per_s=rate), **changes)

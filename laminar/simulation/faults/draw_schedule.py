"""Draws fault schedules: small clusters, short steps, every schedule, and up to a handful of faults.

Invariant: every config drawn is one that `laminar train` would accept; limits are such that faults of both sorts occur, those
that pass unnoticed and those by which a worker counts as lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from laminar.config.schema import ExperimentConfig
from laminar.simulation.faults import fault as faults
from laminar.simulation.faults.fault_schedule import FaultSchedule, WorkloadFigures

SCHEDULES = ("laminar", "laminar", "partial", "synchronous", "one_step", "stream")
HEARTBEAT_S = 2.0
WAVE_S = 20.0  # longer than the longest trajectory takes, its reward included
SILENCE_LIMIT_S = 9.0
SUSPECT_AFTER_S = 4.5
FULL_PIPELINE = 6  # steps' worth of groups that may be in progress, by max_staleness and outstanding_batches
CONTROLLERS = 0xC0  # stream of random numbers of the controllers' losses
TURNS = 0x7042  # stream of random numbers of what has to do with turns
RUN_S = 35.0  # about what a run takes; faults strike within it


class _Draw:
    """The generator, with the few distributions that are needed."""

    def __init__(self, *seed: int) -> None:
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((0x1A31, *seed))))

    def integer(self, low: int, high: int) -> int:
        """Uniform, both included."""
        return int(self._rng.integers(low, high, endpoint=True))

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return bool(self._rng.random() < probability)

    def one_of(self, *values: Any) -> Any:
        """One of them."""
        return values[self.integer(0, len(values) - 1)]

    def seconds(self, low: float, high: float) -> float:
        """Uniform, in milliseconds."""
        return round(low + (high - low) * float(self._rng.random()), 3)


def draw_schedule(seed: int) -> FaultSchedule:
    """The fault schedule of a seed."""
    draw = _Draw(seed)
    config = _config(draw, seed)
    workload, drawn = _workload(draw, config), _faults(draw, config)
    schedule = FaultSchedule(seed=seed, config=config, workload=workload, faults=drawn)
    return _with_controllers(_Draw(seed, CONTROLLERS), _with_turns(_Draw(seed, TURNS), schedule))


def _with_controllers(draw: _Draw, schedule: FaultSchedule) -> FaultSchedule:
    """A third of them lose the controller, some of these more than once, and some while something else is being mended."""
    drawn = list(schedule.faults)
    if draw.chance(0.33):
        for _ in range(draw.one_of(1, 1, 1, 2, 3)):
            moment: faults.Moment = draw.one_of("", "", "publish", "broadcast", "loss", "restart")
            delay_s = draw.one_of(0.0, draw.seconds(0.0, 3.0))
            drawn.append(faults.ControllerLost(at=_at(draw), moment=moment, delay_s=delay_s))
    return replace(schedule, faults=tuple(sorted(drawn, key=lambda fault: fault.at)))


def _with_turns(draw: _Draw, schedule: FaultSchedule) -> FaultSchedule:
    """Some of them have trajectories of several turns, and environments that fail."""
    if not draw.chance(0.4):
        return schedule
    environment = {
        "name": "python_tool",
        "max_turns": draw.one_of(2, 4, 4, 8),
        "step_timeout_s": draw.one_of(14.0, 20.0),
        "retries": draw.one_of(0, 1, 2),
        "on_error": draw.one_of("drop", "drop", "drop", "fail"),
    }
    config = schedule.config.model_dump(mode="json", exclude_defaults=True) | {"environment": environment}
    workload = replace(schedule.workload, tool_calls=draw.integer(1, 4), tool_s=draw.one_of(0.05, 0.3, 1.0))
    # Enough for a full pipeline's calls if each worker made one at a time, and for some that hang.
    trainer, controller = schedule.config.trainer, config["controller"]
    calls = FULL_PIPELINE * trainer.groups_per_step * trainer.group_size * workload.tool_calls
    controller["step_timeout_s"] += 60.0 + 1.2 * calls * workload.tool_s / schedule.config.reward.workers
    drawn = list(schedule.faults)
    if draw.chance(0.5):
        drawn.append(faults.BadTurn(at=_at(draw), how=draw.one_of("hang", "raise", "nan"), count=draw.integer(1, 3)))
    return replace(
        schedule,
        config=ExperimentConfig.model_validate(config),
        workload=workload,
        faults=tuple(sorted(drawn, key=lambda fault: fault.at)),
    )


def _config(draw: _Draw, seed: int) -> ExperimentConfig:
    name = draw.one_of(*SCHEDULES)
    parts = draw.one_of(1, 2, 2, 3)
    groups_per_step = parts * draw.integer(1, 3)
    group_size = draw.integer(2, 4)
    max_running = group_size * draw.integer(1, 4) + draw.integer(0, group_size - 1)
    trainer = {
        "ranks": draw.integer(1, 2),
        "steps": draw.integer(3, 8),
        "groups_per_step": groups_per_step,
        "group_size": group_size,
        "mini_batches": parts,
        "restarts": draw.one_of(1, 3, 3),
        "checkpoint_every": draw.one_of(0, 1, 2, 2, 3, 3),
    }
    sampling = _dynamic_sampling(_Draw(seed, 1))
    waves = -(-groups_per_step // (max_running // group_size))
    schedule: dict[str, Any] = {"name": name, "on_stale": draw.one_of("drop", "drop", "train")}
    if name in ("laminar", "partial"):
        schedule["max_staleness"] = draw.one_of(0, 1, 1, 2, 4, "unbounded", None)
        schedule["outstanding_batches"] = draw.one_of(1.0, 1.5, 2.0, 4.0)
    elif name != "synchronous":
        schedule["max_staleness"] = draw.one_of(1, 1, 2, None)
    return ExperimentConfig.model_validate(
        {
            "name": f"faults-{seed}",
            "seed": seed,
            "model": {"path": "modelled"},
            "data": {
                "source": {"type": "jsonl", "path": "modelled.jsonl"},
                "max_prompt_tokens": 64,
                "last_batch": draw.one_of("train", "drop"),
            },
            "reward": {
                "function": "exact",
                "workers": draw.integer(1, 3),
                "timeout_s": draw.one_of(3.0, 15.0),
                "on_invalid": draw.one_of("drop", "drop", "zero", "fail"),
            },
            "rollout": {
                "replicas": draw.integer(1, 5),
                "max_running": max_running,
                "max_response_tokens": draw.one_of(160, 400),
                "delta_interval_s": draw.one_of(0.25, 0.5, 1.0),
                "restarts": draw.one_of(0, 1, 3, 3, 8),
                "suspect_after_s": SUSPECT_AFTER_S,
                "silence_limit_s": draw.one_of(6.0, SILENCE_LIMIT_S),
                "on_lost_version": draw.one_of("regenerate", "regenerate", "regenerate", "wait"),
            },
            "relay": {
                "count": draw.integer(1, 4),
                "keep_versions": draw.one_of(1, 1, 2, 3),
                "broadcast_timeout_s": draw.one_of(4.0, 20.0),
                "stall_limit_s": draw.one_of(1.5, 3.0),
                "restarts": draw.one_of(1, 3, 3),
            },
            "trainer": trainer,
            "algorithm": {"dynamic_sampling": sampling},
            "evaluation": _evaluation(_Draw(seed, 2), group_size),  # its own generator: the rest stays what it was
            "schedule": schedule,
            "buffer": _buffer(draw, name, schedule, groups_per_step),
            "repack": {
                "enabled": draw.chance(0.7) and name == "laminar",
                "interval_s": draw.one_of(0.5, 1.0, 2.0),
                "move_kv": draw.one_of("auto", "always", "never"),
                "kv_ceiling": draw.one_of(0.5, 0.9),
                "batch_bound": min(draw.integer(2, 12), max_running),
            },
            "controller": {
                "heartbeat_s": HEARTBEAT_S,
                "silence_limit_s": SILENCE_LIMIT_S,
                "start_timeout_s": 60.0,
                # Enough for the last rollout that is left to make a step's groups, one wave after the other.
                "step_timeout_s": max(90.0, WAVE_S * waves * (1 + sampling["enabled"] * sampling["max_refills"])),
            },
        }
    )


def _dynamic_sampling(draw: _Draw) -> dict[str, Any]:
    """From a generator of its own; half of the modelled rewards are 1, so many of the small groups are refused."""
    return {"enabled": draw.chance(0.4), "max_refills": draw.one_of(0.4, 1.0, 3.0)}


def _evaluation(draw: _Draw, group_size: int) -> dict[str, Any] | None:
    if draw.chance(0.5):
        return None
    samples = draw.integer(1, min(3, group_size))  # the workload has lengths for a group
    return {
        "source": {"type": "jsonl", "path": "held-out.jsonl"},
        "prompts": draw.integer(1, 6),
        "samples": samples,
        "every": draw.one_of(0, 1, 2, 3),
        "at_start": draw.chance(0.7),
        "temperature": 0.0 if samples == 1 else 1.0,
        "max_response_tokens": draw.one_of(None, 40, 160),
        "share": draw.one_of(0.1, 0.25, 0.5, 1.0),
    }


def _buffer(draw: _Draw, name: str, schedule: dict[str, Any], groups_per_step: int) -> dict[str, Any]:
    buffer: dict[str, Any] = {
        "strategy": draw.one_of("fifo", "freshest", "staleness_weighted"),
        "half_life": draw.one_of(0.5, 1.0),
    }
    least = groups_per_step
    if name in ("synchronous", "one_step", "stream"):
        bound = 0 if name == "synchronous" else schedule["max_staleness"] or 1
        least *= bound + 1
    if draw.chance(0.25):
        buffer["capacity"] = least + draw.integer(0, groups_per_step)
    if draw.chance(0.2):
        buffer["max_age"] = draw.integer(0, 3)
    return buffer


def _workload(draw: _Draw, config: ExperimentConfig) -> WorkloadFigures:
    needed = config.trainer.steps * config.trainer.groups_per_step
    prompts = None
    if draw.chance(0.4):  # not less than one step where an incomplete one is left out
        prompts = max(config.trainer.groups_per_step, needed + draw.integer(-needed // 2, needed // 2))
    median = draw.one_of(8, 40, 120)
    return WorkloadFigures(
        seed=draw.integer(0, 2**31),
        prompts=prompts,
        prompt_tokens=16,
        prompt_tokens_p99=draw.one_of(48, 48, 120),
        response_tokens=median,
        response_tokens_p99=median * draw.one_of(2, 6, 20),
        latency_s=draw.one_of(0.0, 0.0005, 0.05),
        latency_jitter_s=draw.one_of(0.0, 0.001, 0.2),
    )


# ------------------------------------------------------------ faults


def _faults(draw: _Draw, config: ExperimentConfig) -> tuple[faults.Fault, ...]:
    mood = draw.one_of("calm", "usual", "usual", "usual", "storm", "siege")
    count = {"calm": draw.integer(0, 1), "usual": draw.integer(1, 4), "storm": draw.integer(4, 10)}.get(mood, 5)
    besieged = draw.one_of("rollout", "rollout", "relay", "trainer")  # all faults of a siege strike one kind of worker
    drawn: list[faults.Fault] = []
    for _ in range(count):
        worker = _worker(draw, config, besieged if mood == "siege" else "")
        drawn.append(_worker_fault(draw, worker) if mood == "siege" else _fault(draw, config, worker))
        if draw.chance(0.3):  # and something else at the same moment, or while it is being mended
            drawn.append(_together(draw, config, drawn[-1]))
    return tuple(sorted(drawn, key=lambda fault: fault.at))


def _at(draw: _Draw) -> float:
    """Rather early than late: not every run is long. Some strike during the start."""
    start = draw.seconds(0.0, 3.0)
    return start if draw.chance(0.06) else round(2.0 + RUN_S * draw.seconds(0.0, 1.0) ** 1.5, 3)


def _fault(draw: _Draw, config: ExperimentConfig, worker: str) -> faults.Fault:
    """Any of them; those that strike a worker strike this one."""
    at, kind = _at(draw), draw.integer(0, 22)
    if kind < 2:
        return faults.BadReward(at=at, how=draw.one_of("hang", "raise", "nan"), count=draw.integer(1, 2))
    if kind == 2:
        return faults.FailedCheckpoint(at=at, count=draw.integer(1, 2))
    if kind == 3:
        generation, training = draw.one_of((True, True), (True, False), (False, True))
        return faults.Pause(at=at, generation=generation, training=training, seconds=draw.seconds(0.5, 120))
    if kind == 4 and draw.chance(0.5):
        return faults.Stop(at=at)
    if kind == 5:
        moment = draw.one_of("publish", "broadcast")
        delay_s = draw.one_of(0.0, draw.seconds(0.0, 0.5))
        return faults.Kill(at=at, moment=moment, delay_s=delay_s, worker="relay-0")  # the master
    if kind == 6:
        moment = draw.one_of("", "publish", "broadcast", "loss", "restart")
        return faults.RelayTierLost(at=at, moment=moment, delay_s=draw.one_of(0.0, draw.seconds(0.0, 1.0)))
    if kind == 7 and draw.chance(0.5):
        return faults.HostLost(at=at, relay=draw.integer(0, config.relay.count - 1))
    if kind == 8:  # any relay, while a version is under way
        name = f"relay-{draw.integer(0, config.relay.count - 1)}"
        delay_s = draw.seconds(0.0, 0.7)
        if draw.chance(0.5):
            return faults.Hang(at=at, moment="broadcast", delay_s=delay_s, worker=name, seconds=_outage(draw))
        return faults.Kill(at=at, moment="broadcast", delay_s=delay_s, worker=name)
    if kind == 9:
        return faults.Add(at=at, count=draw.integer(1, 3))
    if kind < 13 and worker.startswith("rollout"):
        return _departure(draw, at, worker)
    return _worker_fault(draw, worker)


def _departure(draw: _Draw, at: float, worker: str) -> faults.Fault:
    """A rollout leaves, on request or because its host goes; half of them at a moment when something else happens."""
    moment: faults.Moment = draw.one_of("", "publish", "broadcast", "loss", "restart") if draw.chance(0.5) else ""
    delay_s = draw.seconds(0.0, 1.0)
    kind = draw.integer(0, 2)
    if kind == 0:
        return faults.Drain(at=at, moment=moment, delay_s=delay_s, worker=worker)
    if kind == 1:
        return faults.Remove(at=at, moment=moment, delay_s=delay_s, worker=worker)
    return faults.SpotNotice(at=at, moment=moment, delay_s=delay_s, worker=worker, seconds=draw.one_of(0.5, 3.0, 15.0))


def _worker_fault(draw: _Draw, worker: str) -> faults.Fault:
    at, kind = _at(draw), draw.integer(0, 14)
    if kind < 2:
        return faults.Hang(at=at, worker=worker, seconds=_outage(draw))
    if kind < 4:
        return faults.Partition(at=at, worker=worker, seconds=_outage(draw))
    if kind == 4:
        return faults.SlowLink(at=at, worker=worker, seconds=draw.seconds(1, 15), extra_s=draw.seconds(0.1, 4))
    if kind < 7:
        return faults.Duplicates(at=at, worker=worker, seconds=draw.seconds(2, 30), probability=draw.one_of(0.2, 0.7))
    if kind == 7:
        moment = draw.one_of("publish", "broadcast", "loss", "restart")
        return faults.Kill(at=at, moment=moment, delay_s=draw.one_of(0.0, draw.seconds(0.0, 3.0)), worker=worker)
    if kind == 8:
        return faults.Fail(at=at, worker=worker)
    return faults.Kill(at=at, worker=worker)


def _together(draw: _Draw, config: ExperimentConfig, first: faults.Fault) -> faults.Fault:
    worker = _worker(draw, config)
    if draw.chance(0.4):  # at the same instant
        return faults.Kill(at=first.at, moment=first.moment, delay_s=first.delay_s, worker=worker)
    if draw.chance(0.5) and faults.worker_of(first):  # the same again, while it is brought back
        worker = faults.worker_of(first)
    return faults.Kill(
        at=first.at, moment=draw.one_of("loss", "restart"), delay_s=draw.seconds(0.0, 6.0), worker=worker
    )


def _outage(draw: _Draw) -> float:
    """Seconds; sometimes shorter, sometimes longer than the limit of silence, sometimes close to it."""
    return draw.one_of(draw.seconds(0.1, 5.0), draw.seconds(7.0, 12.0), draw.seconds(12.0, 30.0))  # type: ignore[no-any-return]


def _worker(draw: _Draw, config: ExperimentConfig, kind: str = "") -> str:
    """One of a kind, or of any."""
    any_kind = draw.one_of("rollout", "rollout", "rollout", "relay", "environment", faults.TRAINER)
    kind = kind or any_kind
    if kind == faults.TRAINER:
        return kind
    counts = {"rollout": config.rollout.replicas, "relay": config.relay.count, "environment": config.reward.workers}
    return f"{kind}-{draw.integer(0, counts[kind] - 1)}"

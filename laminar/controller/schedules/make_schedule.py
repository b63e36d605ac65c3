"""From the config to a schedule.

Invariant: a combination of keys under which the bound would mean nothing, or no batch could ever be put together, is
refused here, before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from laminar.config.schema import ExperimentConfig
from laminar.controller.buffer_strategies import load_strategy
from laminar.controller.schedules.laminar import LaminarSchedule
from laminar.controller.schedules.one_step import OneStepSchedule
from laminar.controller.schedules.partial import PartialSchedule
from laminar.controller.schedules.schedule import Schedule
from laminar.controller.schedules.stream import StreamSchedule
from laminar.controller.schedules.synchronous import SynchronousSchedule
from laminar.errors import UserError

DEFAULT_STALENESS = {"laminar": 4, "partial": 4, "one_step": 1, "stream": 1, "synchronous": 0}
IN_ORDER = ("synchronous", "one_step", "stream")


def make_schedule(config: ExperimentConfig) -> Schedule:
    """The schedule that the config names, with its buffer strategy where it has one.

    Raises:
        UserError: keys of `schedule` and `buffer` that do not fit together, or a strategy that cannot be loaded.
    """
    for problem in schedule_problems(config):
        raise UserError(problem)
    groups_per_step = config.trainer.groups_per_step
    bound = max_staleness(config)
    match config.schedule.name:
        case "laminar" | "partial" as name:
            kind = LaminarSchedule if name == "laminar" else PartialSchedule
            return kind(
                groups_per_step=groups_per_step,
                max_staleness=bound,
                strategy=load_strategy(config),
                outstanding_batches=config.schedule.outstanding_batches,
            )
        case "synchronous":
            return SynchronousSchedule(groups_per_step=groups_per_step)
        case "one_step":
            return OneStepSchedule(groups_per_step=groups_per_step, max_staleness=bound)
        case "stream":
            assert bound is not None  # schedule_problems has checked it
            return StreamSchedule(
                groups_per_step=groups_per_step, max_staleness=bound, parts=config.trainer.mini_batches
            )


def max_staleness(config: ExperimentConfig) -> int | None:
    """The bound in versions that holds in this run, the schedule's own where the config gives none; None: unbounded."""
    bound = config.schedule.max_staleness
    if bound is None:
        return DEFAULT_STALENESS[config.schedule.name]
    return None if bound == "unbounded" else bound


def schedule_problems(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with the keys of `schedule` and `buffer` taken together, one line each; imports no user code."""
    name, bound = config.schedule.name, max_staleness(config)
    key = f"schedule.max_staleness: {config.schedule.max_staleness}"
    if name == "synchronous" and bound != 0:
        yield (
            f"{key}; `synchronous` has no staleness: expected 0 or null; "
            "take schedule.name: one_step for batches generated in advance"
        )
        return
    if name in ("one_step", "stream") and (bound is None or bound < 1):
        yield (
            f"{key}; `{name}` generates that many batches in advance: expected a number of 1 or more, or null; "
            "take schedule.name: synchronous for none in advance, laminar for no bound"
        )
        return
    least, why = config.trainer.groups_per_step, "trainer.groups_per_step: with fewer no step could be put together"
    if name in IN_ORDER and bound is not None:
        least *= bound + 1
        why = f"(max_staleness + 1) x trainer.groups_per_step: `{name}` trains in order and needs all that it generates"
    if config.buffer.capacity is not None and config.buffer.capacity < least:
        yield f"buffer.capacity: {config.buffer.capacity}; expected at least {least}, {why}; raise it or set it to null"

"""Makes a failing fault schedule as small as it gets: fewer faults, then rounder times, then a smaller config.

Invariant: what is returned fails as the original did; it is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from laminar.config.checks import check_config
from laminar.config.schema import ExperimentConfig
from laminar.controller.schedules.make_schedule import schedule_problems
from laminar.errors import UserError
from laminar.simulation.faults.fault import Fault, from_json, to_json
from laminar.simulation.faults.fault_schedule import FaultSchedule

Fails = Callable[[FaultSchedule], bool]

TRIES = 400  # runs that shrinking may cost

# (section, key, values to try, the simplest first)
SIMPLER: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("repack", "enabled", (False,)),
    ("rollout", "replicas", (1, 2, 3)),
    ("relay", "count", (1, 2)),
    ("relay", "keep_versions", (2,)),
    ("reward", "workers", (1,)),
    ("trainer", "ranks", (1,)),
    ("trainer", "mini_batches", (1,)),
    ("trainer", "groups_per_step", (1, 2)),
    ("trainer", "group_size", (2,)),
    ("trainer", "steps", (1, 2, 3)),
    ("trainer", "checkpoint_every", (1,)),
    ("buffer", "capacity", (None,)),
    ("buffer", "max_age", (None,)),
    ("buffer", "strategy", ("fifo",)),
    ("schedule", "name", ("laminar",)),
    ("schedule", "max_staleness", (None, 1)),
)


def shrink(schedule: FaultSchedule, fails: Fails, *, tries: int = TRIES) -> FaultSchedule:
    """The smallest schedule found that still fails.

    Args:
        schedule: one that fails.
        fails: whether a schedule fails in the same way.
        tries: how often to ask it at most.
    """
    search = _Search(schedule, fails, tries)
    before = None
    while before != search.best and search.tries_left > 0:
        before = search.best
        _fewer_faults(search)
        for number in range(len(search.best.faults)):
            search.try_all(_simpler_fault(search.best, number))
        for section, key, values in SIMPLER:
            search.try_all(_simpler_config(search.best, section, key, values))
        if search.best.workload.prompts is not None:
            search.try_all([replace(search.best, workload=replace(search.best.workload, prompts=None))])
        quiet = replace(search.best.workload, latency_s=0.0005, latency_jitter_s=0.0)
        search.try_all([replace(search.best, workload=quiet)])
    return search.best


class _Search:
    """The best schedule so far."""

    def __init__(self, schedule: FaultSchedule, fails: Fails, tries: int) -> None:
        self.best = schedule
        self.tries_left = tries
        self._fails = fails

    def try_one(self, candidate: FaultSchedule) -> bool:
        """Take it if it fails too."""
        if candidate == self.best or self.tries_left <= 0:
            return False
        self.tries_left -= 1
        if not self._fails(candidate):
            return False
        self.best = candidate
        return True

    def try_all(self, candidates: Iterator[FaultSchedule] | list[FaultSchedule]) -> None:
        """Take the first that fails too."""
        for candidate in candidates:
            if self.try_one(candidate):
                return


def _fewer_faults(search: _Search) -> None:
    """Delta debugging (Zeller and Hildebrandt, 2002): leave out ever smaller parts of the faults while it still fails."""
    parts = 2
    search.try_one(replace(search.best, faults=()))
    while len(search.best.faults) >= 1 and search.tries_left > 0:
        faults = search.best.faults
        size = -(-len(faults) // parts)
        for start in range(0, len(faults), size):
            if search.try_one(replace(search.best, faults=(*faults[:start], *faults[start + size :]))):
                parts = max(2, parts - 1)
                break
        else:
            if size == 1:
                return
            parts = min(len(faults), 2 * parts)


def _simpler_fault(schedule: FaultSchedule, number: int) -> Iterator[FaultSchedule]:
    """The same with rounder times in one fault."""
    fault = schedule.faults[number]
    for digits in (0, 1):
        yield _with_fault(schedule, number, _rounded(fault, digits))
    for digits in (0, 1):
        yield _with_fault(schedule, number, replace(fault, at=round(fault.at, digits)))
    if fault.delay_s:
        yield _with_fault(schedule, number, replace(fault, delay_s=0.0))


def _rounded(fault: Fault, digits: int) -> Fault:
    values = to_json(fault)
    return from_json(
        {key: round(value, digits) if isinstance(value, float) else value for key, value in values.items()}
    )


def _with_fault(schedule: FaultSchedule, number: int, fault: Fault) -> FaultSchedule:
    return replace(schedule, faults=(*schedule.faults[:number], fault, *schedule.faults[number + 1 :]))


def _simpler_config(
    schedule: FaultSchedule, section: str, key: str, values: tuple[Any, ...]
) -> Iterator[FaultSchedule]:
    tree: dict[str, Any] = schedule.config.model_dump()
    now = tree[section][key]
    for value in values:
        if value == now:
            return
        if isinstance(value, int) and isinstance(now, int) and not isinstance(value, bool) and value > now:
            return
        config = _valid({**tree, section: {**tree[section], key: value}})
        if config is not None:
            yield replace(schedule, config=config)


def _valid(tree: Mapping[str, Any]) -> ExperimentConfig | None:
    try:
        config = ExperimentConfig.model_validate(tree)
        check_config(config)
    except (ValidationError, UserError):
        return None
    return None if any(schedule_problems(config)) else config

"""Shrinking, on failures that are made up."""

from dataclasses import replace

import pytest

from laminar.simulation.faults.draw_schedule import draw_schedule
from laminar.simulation.faults.fault import Kill, Stop
from laminar.simulation.faults.shrink import shrink


def schedule_of(*faults):
    return replace(draw_schedule(0), faults=faults)


def kills(*names):
    return tuple(Kill(at=1.234 + k, worker=name) for k, name in enumerate(names))


@pytest.mark.parametrize("needed", [{"a"}, {"a", "h"}, {"d", "e"}, {"a", "d", "h"}])
def test_only_the_faults_that_it_takes_are_left(needed):
    schedule = schedule_of(*kills(*"abcdefgh"))
    small = shrink(schedule, lambda tried: needed <= {fault.worker for fault in tried.faults})
    assert {fault.worker for fault in small.faults} == needed


def test_what_fails_without_any_fault_is_left_with_none():
    assert shrink(schedule_of(*kills(*"abc")), lambda tried: True).faults == ()


def test_times_are_made_round_where_it_still_fails():
    small = shrink(schedule_of(Kill(at=12.3456, worker="a")), lambda tried: bool(tried.faults))
    assert small.faults == (Kill(at=12.0, worker="a"),)
    small = shrink(
        schedule_of(Stop(at=12.3456)), lambda tried: bool(tried.faults) and 12.3 <= tried.faults[0].at < 12.4
    )
    assert small.faults == (Stop(at=12.3),)


def test_the_config_becomes_simpler_and_stays_valid():
    schedule = draw_schedule(5)
    small = shrink(schedule, lambda tried: tried.config.relay.count >= min(2, schedule.config.relay.count))
    assert small.config.rollout.replicas == 1 and small.config.trainer.steps == 1
    assert small.config.relay.count == min(2, schedule.config.relay.count)
    assert small.workload.prompts is None


def test_no_more_runs_are_made_than_allowed():
    asked = []

    def fails(tried):
        asked.append(tried)
        return len(tried.faults) % 2 == 0

    shrink(schedule_of(*kills(*"abcdefghijklmnop")), fails, tries=10)
    assert len(asked) <= 10


def test_the_result_fails_and_is_the_same_every_time():
    def fails(tried):
        return sum(fault.at for fault in tried.faults) > 8

    results = [shrink(schedule_of(*kills(*"abcdefgh")), fails) for _ in range(2)]
    assert results[0] == results[1]
    assert fails(results[0])

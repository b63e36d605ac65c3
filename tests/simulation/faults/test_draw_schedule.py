"""The generator: what it draws is valid, depends on the seed alone, and covers everything."""

from collections import Counter

from laminar.config.checks import check_config
from laminar.controller.schedules.make_schedule import schedule_problems
from laminar.simulation.faults.draw_schedule import SILENCE_LIMIT_S, draw_schedule
from laminar.simulation.faults.fault import FAULTS, MOMENTS, Hang, Partition
from laminar.simulation.faults.fault_schedule import FaultSchedule

MANY = [draw_schedule(seed) for seed in range(400)]


def test_every_config_is_one_that_a_run_would_accept():
    for schedule in MANY:
        check_config(schedule.config)
        assert not list(schedule_problems(schedule.config))


def test_a_seed_always_gives_the_same_and_another_gives_another():
    assert [draw_schedule(seed) for seed in range(50)] == MANY[:50]
    assert len({schedule.to_json() for schedule in MANY}) == len(MANY)


def test_schedules_go_through_json_unchanged():
    for schedule in MANY:
        assert FaultSchedule.from_json(schedule.to_json()) == schedule


def test_all_schedules_faults_and_moments_occur():
    names = Counter(schedule.config.schedule.name for schedule in MANY)
    assert set(names) == {"laminar", "partial", "synchronous", "one_step", "stream"}
    drawn = [fault for schedule in MANY for fault in schedule.faults]
    assert {type(fault) for fault in drawn} == set(FAULTS.values())
    assert {fault.moment for fault in drawn} == set(MOMENTS)
    assert any(not schedule.faults for schedule in MANY)
    assert {schedule.config.schedule.max_staleness for schedule in MANY} >= {0, 1, 2, 4, "unbounded", None}


def test_outages_are_shorter_and_longer_than_the_limit_of_silence():
    seconds = [fault.seconds for schedule in MANY for fault in schedule.faults if isinstance(fault, Hang | Partition)]
    assert min(seconds) < SILENCE_LIMIT_S / 2 and max(seconds) > 2 * SILENCE_LIMIT_S
    assert any(SILENCE_LIMIT_S - 2 < each < SILENCE_LIMIT_S + 2 for each in seconds)

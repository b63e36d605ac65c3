"""The schedules that train in the order of admission: `synchronous`, `one_step`, `stream`."""

from laminar.controller.schedules.one_step import OneStepSchedule
from laminar.controller.schedules.schedule import ReadyGroup
from laminar.controller.schedules.stream import StreamSchedule
from laminar.controller.schedules.synchronous import SynchronousSchedule


def select(schedule, ready, running=None, *, part=0, ended=False):
    """`ready` and `running`: {group id: version}; `ready` in the order of completion."""
    groups = [ReadyGroup(group_id=k, policy_version=v, completed=n) for n, (k, v) in enumerate(ready.items())]
    outstanding = {**ready, **(running or {})}
    return schedule.select(groups, outstanding, published_version=1, part=part, no_more_groups=ended)


def test_synchronous_starts_nothing_in_advance():
    schedule = SynchronousSchedule(groups_per_step=2)
    assert schedule.synchronizes and not schedule.interrupts
    assert schedule.room(serving_version=3, published_version=3, outstanding=1, taken=0, steps_left=9)
    assert not schedule.room(serving_version=3, published_version=3, outstanding=2, taken=0, steps_left=9)


def test_one_step_waits_for_its_batch_whatever_else_is_ready():
    schedule = OneStepSchedule(groups_per_step=2, max_staleness=1)
    assert (schedule.parts, schedule.batch_groups, schedule.synchronizes) == (1, 2, True)
    assert select(schedule, {3: 1, 2: 1, 1: 0}, {0: 0}) is None
    assert select(schedule, {3: 1, 1: 0, 0: 0}, {2: 1}) == [0, 1]


def test_a_dropped_group_makes_room_for_the_next_in_order():
    schedule = OneStepSchedule(groups_per_step=2, max_staleness=1)
    assert select(schedule, {3: 1, 2: 1, 1: 0}) == [1, 2]


def test_older_versions_go_first_even_if_they_started_later():
    schedule = OneStepSchedule(groups_per_step=1, max_staleness=1)
    assert select(schedule, {4: 1, 5: 0}) == [5]


def test_stream_takes_what_completed_first_from_the_current_batch_alone():
    schedule = StreamSchedule(groups_per_step=4, max_staleness=1, parts=2)
    assert (schedule.parts, schedule.batch_groups) == (2, 2)
    assert select(schedule, {4: 1, 3: 0, 5: 1}, {0: 0, 1: 0, 2: 0}) is None
    assert select(schedule, {4: 1, 3: 0, 5: 1, 1: 0}, {0: 0, 2: 0}) == [1, 3]
    assert select(schedule, {3: 0, 1: 0, 0: 0}, {2: 0}) == [1, 3]


def test_the_last_part_of_stream_waits_for_the_tail_of_the_batch():
    schedule = StreamSchedule(groups_per_step=4, max_staleness=1, parts=2)
    assert select(schedule, {4: 1, 0: 0}, {2: 0}, part=1) is None
    assert select(schedule, {4: 1, 0: 0, 2: 0}, part=1) == [0, 2]


def test_the_last_batch_is_short_when_the_data_has_ended():
    for schedule in (
        OneStepSchedule(groups_per_step=4, max_staleness=1),
        StreamSchedule(groups_per_step=8, max_staleness=1, parts=2),
    ):
        assert select(schedule, {1: 0, 2: 0}, {0: 0}, ended=True) is None
        assert select(schedule, {1: 0, 2: 0}, ended=True) == [1, 2]
        assert select(schedule, {1: 0, 2: 0}) is None
        assert select(schedule, {}, ended=True) is None

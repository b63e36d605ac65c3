"""From the keys of `schedule`, `buffer` and `trainer` to a schedule."""

import pytest

from laminar.controller.schedules.laminar import LaminarSchedule
from laminar.controller.schedules.make_schedule import make_schedule, max_staleness, schedule_problems
from laminar.controller.schedules.one_step import OneStepSchedule
from laminar.controller.schedules.partial import PartialSchedule
from laminar.controller.schedules.stream import StreamSchedule
from laminar.controller.schedules.synchronous import SynchronousSchedule
from laminar.errors import UserError
from tests.run_parts import a_config


def experiment(name, bound=None, **buffer):
    config = a_config()
    return config.model_copy(
        update={
            "schedule": type(config.schedule)(name=name, max_staleness=bound),
            "buffer": type(config.buffer)(**buffer),
            "trainer": config.trainer.model_copy(update={"groups_per_step": 4, "mini_batches": 2, "steps": 10}),
        }
    )


@pytest.mark.parametrize(
    "name, kind, staleness, parts",
    [
        ("laminar", LaminarSchedule, 4, 1),
        ("partial", PartialSchedule, 4, 1),
        ("synchronous", SynchronousSchedule, 0, 1),
        ("one_step", OneStepSchedule, 1, 1),
        ("stream", StreamSchedule, 1, 2),
    ],
)
def test_each_name_makes_its_schedule_with_its_own_staleness(name, kind, staleness, parts):
    config = experiment(name)
    schedule = make_schedule(config)
    assert type(schedule) is kind
    assert max_staleness(config) == staleness
    assert (schedule.parts, schedule.batch_groups) == (parts, 4 // parts)
    at_most = 4 * (staleness + 1)
    assert schedule.room(serving_version=0, published_version=0, outstanding=at_most - 1, taken=0, steps_left=10)
    assert not schedule.room(serving_version=0, published_version=0, outstanding=at_most, taken=0, steps_left=10)


def test_unbounded_admits_up_to_two_batches_that_are_outstanding():
    schedule = make_schedule(experiment("laminar", "unbounded"))
    assert schedule.room(serving_version=0, published_version=99, outstanding=7, taken=0, steps_left=10) == 1
    assert schedule.room(serving_version=0, published_version=99, outstanding=8, taken=0, steps_left=10) == 0


@pytest.mark.parametrize(
    "name, bound, remedy",
    [
        ("synchronous", 1, "one_step"),
        ("synchronous", "unbounded", "one_step"),
        ("one_step", 0, "synchronous"),
        ("stream", "unbounded", "laminar"),
    ],
)
def test_a_staleness_that_does_not_fit_the_schedule_is_refused(name, bound, remedy):
    with pytest.raises(UserError, match=f"schedule.max_staleness: {bound}; .*{name}.*{remedy}"):
        make_schedule(experiment(name, bound))


@pytest.mark.parametrize("name, least", [("laminar", 4), ("one_step", 8), ("synchronous", 4)])
def test_a_capacity_that_could_never_fill_a_step_is_refused(name, least):
    assert not list(schedule_problems(experiment(name, capacity=least)))
    with pytest.raises(UserError, match=f"buffer.capacity: {least - 1}; expected at least {least}"):
        make_schedule(experiment(name, capacity=least - 1))


def test_an_unknown_strategy_is_refused():
    with pytest.raises(UserError, match="did you mean freshest"):
        make_schedule(experiment("partial", strategy="fresh"))

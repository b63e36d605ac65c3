"""Admission, and which groups are stale after a loss of steps."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.controller.schedules.bounded import BoundedSchedule


def admits(schedule, version, outstanding, *, published=None, taken=0, steps_left=100):
    return schedule.room(
        serving_version=version,
        published_version=version if published is None else published,
        outstanding=outstanding,
        taken=taken,
        steps_left=steps_left,
    )


def test_admits_as_many_groups_as_the_staleness_bound_allows():
    schedule = BoundedSchedule(groups_per_step=4, max_staleness=1)
    assert admits(schedule, 0, 7) == 1
    assert admits(schedule, 0, 8) == 0
    assert admits(schedule, 5, 3) == 5


def test_a_rollout_that_lags_behind_admits_fewer():
    schedule = BoundedSchedule(groups_per_step=4, max_staleness=1)
    assert admits(schedule, 2, 3, published=3) == 1
    assert admits(schedule, 2, 0, published=4) == 0


def test_what_a_step_has_taken_has_its_places():
    schedule = BoundedSchedule(groups_per_step=4, max_staleness=1)
    assert admits(schedule, 0, 3, taken=4) == 1


def test_never_admits_more_than_all_steps_need():
    for bound in (10, None):
        schedule = BoundedSchedule(groups_per_step=4, max_staleness=bound, outstanding_batches=100)
        assert admits(schedule, 0, 7, steps_left=2) == 1
        assert admits(schedule, 0, 8, steps_left=2) == 0
        assert admits(schedule, 0, 4, taken=4, steps_left=2) == 0


def test_without_a_bound_what_is_outstanding_is_bounded():
    schedule = BoundedSchedule(groups_per_step=4, max_staleness=None, outstanding_batches=1.5)
    assert admits(schedule, 0, 5, published=50) == 1
    assert admits(schedule, 0, 6, published=50) == 0


def test_without_a_bound_nothing_is_stale():
    schedule = BoundedSchedule(groups_per_step=1, max_staleness=None)
    assert schedule.stale([(0, 0, True), (1, 0, False)], published_version=50) == []


def test_the_oldest_are_stale_first_and_of_one_version_those_that_are_not_ready():
    schedule = BoundedSchedule(groups_per_step=2, max_staleness=1)
    outstanding = [(5, 4, True), (4, 3, True), (3, 3, False), (2, 3, True), (1, 2, True), (0, 1, True)]
    # At version 4 only one step is left for version 3, none for those before.
    assert schedule.stale(outstanding, published_version=4) == [0, 1, 3]
    assert schedule.stale(outstanding[:3], published_version=4) == []


@settings(max_examples=200, derandomize=True, database=None)
@given(
    st.integers(1, 3), st.integers(0, 2), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=7), st.data()
)
def test_no_fewer_than_the_stale_groups_can_be_dropped(batch, bound, groups, data):
    schedule = BoundedSchedule(groups_per_step=batch, max_staleness=bound)
    published = data.draw(st.integers(max([version for version, _ in groups], default=0), 6))
    outstanding = [(group_id, *group) for group_id, group in enumerate(groups)]
    versions = [version for version, _ in groups]

    def trainable(dropped):
        """Put the rest into steps, oldest first: whether each group is within the bound in its step."""
        rest = sorted(version for group_id, version in enumerate(versions) if group_id not in dropped)
        return all(published + place // batch - version <= bound for place, version in enumerate(rest))

    stale = schedule.stale(outstanding, published_version=published)
    assert trainable(set(stale))
    assert len(set(stale)) == len(stale)
    for fewer in range(len(stale)):
        assert not any(trainable(set(some)) for some in combinations(range(len(versions)), fewer))

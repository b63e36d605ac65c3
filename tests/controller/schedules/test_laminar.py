"""The choice of batches of the `laminar` schedule: preferences within obligations."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.controller.buffer_strategies import Fifo, Freshest, UserStrategy
from laminar.controller.schedules.laminar import LaminarSchedule
from laminar.controller.schedules.partial import PartialSchedule
from laminar.controller.schedules.schedule import ReadyGroup


def a_schedule(batch=2, bound=1, strategy=None):
    return LaminarSchedule(groups_per_step=batch, max_staleness=bound, strategy=strategy or Fifo())


def groups(versions):
    """Ready groups from {group id: version}."""
    return [ReadyGroup(group_id=k, policy_version=v, completed=n) for n, (k, v) in enumerate(versions.items())]


def select(schedule, ready, running=None, *, at, ended=False):
    """`ready` and `running`: {group id: version}."""
    return schedule.select(
        groups(ready), {**ready, **(running or {})}, published_version=at, part=0, no_more_groups=ended
    )


def test_takes_what_the_strategy_prefers():
    ready = {7: 3, 5: 2, 6: 2, 4: 3}
    assert select(a_schedule(bound=5), ready, at=3) == [4, 5]
    assert select(a_schedule(bound=5, strategy=Freshest()), ready, at=3) == [4, 7]


def test_waits_for_a_full_step():
    assert select(a_schedule(batch=3), {1: 0, 2: 0}, {3: 0}, at=0) is None


def test_waits_for_a_straggler_only_when_its_deadline_has_come():
    ready, straggler = {10: 1, 11: 1}, {1: 0}
    assert select(a_schedule(), ready, straggler, at=0) == [10, 11]
    assert select(a_schedule(), ready, straggler, at=1) is None
    assert select(a_schedule(), {**ready, **straggler}, at=1) == [1, 10]


def test_passes_over_a_preferred_group_where_an_old_one_needs_the_place():
    ready = {1: 0, 2: 1, 3: 1}
    freshest = Freshest()
    assert select(a_schedule(strategy=freshest), ready, at=1) == [2, 1]
    # One step later the place would be lost: two groups of version 1 or older have to go now.
    assert select(a_schedule(batch=2, strategy=freshest), {2: 1, 3: 1, 4: 2, 5: 2}, at=2) == [2, 3]
    assert select(a_schedule(batch=3, bound=2, strategy=freshest), {2: 1, 3: 1, 4: 2, 5: 3}, at=3) == [5, 2, 3]


def test_waits_with_many_ready_groups_while_an_obligation_is_not_ready():
    ready = dict.fromkeys(range(10, 14), 2)
    assert select(a_schedule(batch=3), ready, {1: 1, 2: 1}, at=2) is None


def test_without_a_bound_there_are_no_obligations():
    schedule = a_schedule(bound=None, strategy=Freshest())
    assert select(schedule, {1: 0, 2: 7, 3: 9}, {0: 0}, at=50) == [3, 2]


def test_trains_what_is_left_when_the_data_has_ended():
    schedule = a_schedule(batch=4)
    assert select(schedule, {1: 0}, {2: 0}, at=0, ended=True) is None
    assert select(schedule, {1: 0}, at=0, ended=True) == [1]
    assert select(schedule, {1: 0}, at=0) is None
    assert select(schedule, {}, at=0, ended=True) is None


def test_overdue_groups_are_trained_oldest_first_a_step_at_a_time():
    schedule = a_schedule(batch=2, bound=1, strategy=Freshest())
    overdue = {4: 1, 3: 1, 2: 1, 1: 0, 9: 5}
    assert select(schedule, overdue, at=5) == [2, 1]
    # It waits for as many as fit in the step, not for all that are overdue.
    assert select(schedule, {1: 0, 2: 1}, {3: 1, 4: 1}, at=5) == [2, 1]
    assert select(schedule, {2: 1, 9: 5}, {1: 0}, at=5) is None


def test_partial_differs_only_in_that_it_interrupts():
    schedule = PartialSchedule(groups_per_step=2, max_staleness=1, strategy=Fifo())
    assert schedule.interrupts and not schedule.synchronizes
    assert not a_schedule().interrupts
    assert select(schedule, {10: 1, 11: 1}, {1: 0}, at=1) is None


@settings(max_examples=400, derandomize=True, database=None)
@given(
    batch=st.integers(1, 3),
    bound=st.integers(0, 3),
    ready=st.lists(st.integers(0, 4), max_size=7),
    running=st.lists(st.integers(0, 4), max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_the_choice_is_the_best_ranked_that_keeps_the_bound(batch, bound, ready, running, order):
    """Against all subsets: what stays behind can be trained in time, and no other such batch is ranked higher."""
    published = 4
    ranking = list(range(len(ready)))
    order.shuffle(ranking)

    def rank(groups, *, published_version):
        by_id = {group.group_id: group for group in groups}
        return [by_id[k] for k in ranking]

    def in_time(versions):
        """Whether steps from the next one on can train all of these within the bound."""
        return all(published + 1 + place // batch - v <= bound for place, v in enumerate(sorted(versions)))

    everything = [*ready, *running]
    possible = [
        chosen
        for chosen in combinations(ranking, batch)  # in lexicographic order of preference
        if in_time([version for k, version in enumerate(everything) if k not in chosen])
    ]
    outstanding_in_time = all(published + place // batch - v <= bound for place, v in enumerate(sorted(everything)))
    if not outstanding_in_time:
        return  # only after a loss of steps
    schedule = a_schedule(batch=batch, bound=bound, strategy=UserStrategy("drawn", rank))
    chosen = select(
        schedule, dict(enumerate(ready)), {len(ready) + k: version for k, version in enumerate(running)}, at=published
    )
    assert chosen == (list(possible[0]) if possible else None)

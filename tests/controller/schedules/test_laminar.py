"""The admission bound and the choice of batches of the `laminar` schedule."""

import random
from collections import Counter

import pytest

from laminar.controller.schedules.laminar import LaminarSchedule
from laminar.controller.schedules.schedule import ReadyGroup


def test_admits_as_many_groups_as_the_staleness_bound_allows():
    schedule = LaminarSchedule(groups_per_step=4, max_staleness=1, steps=100)
    assert schedule.may_admit(serving_version=0, admitted=7)
    assert not schedule.may_admit(serving_version=0, admitted=8)
    assert schedule.may_admit(serving_version=1, admitted=8)


def test_never_admits_more_than_all_steps_need():
    schedule = LaminarSchedule(groups_per_step=4, max_staleness=10, steps=2)
    assert schedule.may_admit(serving_version=0, admitted=7)
    assert not schedule.may_admit(serving_version=0, admitted=8)


def test_takes_the_oldest_groups_first():
    schedule = LaminarSchedule(groups_per_step=2, max_staleness=5, steps=100)
    ready = [ReadyGroup(group_id=k, policy_version=version) for k, version in ((7, 3), (5, 2), (6, 2), (4, 3))]
    chosen = schedule.select(ready, {2: 2, 3: 2}, published_version=3, no_more_groups=False)
    assert chosen == [5, 6]


def test_waits_for_a_straggler_only_when_its_deadline_has_come():
    schedule = LaminarSchedule(groups_per_step=2, max_staleness=1, steps=100)
    ready = [ReadyGroup(group_id=k, policy_version=1) for k in (10, 11)]
    straggling = {0: 1, 1: 2}  # one group of version 0 is still generating
    assert schedule.select(ready, straggling, published_version=0, no_more_groups=False) == [10, 11]
    assert schedule.select(ready, straggling, published_version=1, no_more_groups=False) is None


def test_trains_what_is_left_when_the_data_has_ended():
    schedule = LaminarSchedule(groups_per_step=4, max_staleness=1, steps=100)
    ready = [ReadyGroup(group_id=1, policy_version=0)]
    assert schedule.select(ready, {0: 2}, published_version=0, no_more_groups=True) is None
    assert schedule.select(ready, {0: 1}, published_version=0, no_more_groups=True) == [1]
    assert schedule.select([], {}, published_version=0, no_more_groups=True) is None


@pytest.mark.parametrize("seed", range(200))
def test_staleness_stays_bounded_and_nothing_deadlocks(seed):
    """Rollouts of random speed and lag, long stragglers, drops: the bound holds and every step is made."""
    rng = random.Random(seed)
    batch, bound, steps = rng.randint(1, 4), rng.randint(0, 3), rng.randint(1, 12)
    schedule = LaminarSchedule(groups_per_step=batch, max_staleness=bound, steps=steps)
    rollouts = [0] * rng.randint(1, 4)  # version that each serves; it may lag behind
    running: dict[int, int] = {}
    ready: dict[int, int] = {}
    admitted = version = next_group = 0
    while version < steps:
        moves = []
        for k, serving in enumerate(rollouts):
            if schedule.may_admit(serving_version=serving, admitted=admitted):
                moves.append(("start", k))
            if serving < version:
                moves.append(("pull", k))
        moves += [("finish", group) for group in running]
        outstanding = Counter([*running.values(), *ready.values()])
        groups = [ReadyGroup(group_id=group, policy_version=made) for group, made in ready.items()]
        chosen = schedule.select(groups, outstanding, published_version=version, no_more_groups=False)
        if chosen:
            moves.append(("train", 0))
        assert moves, f"dead-lock at version {version}: running {running}, ready {ready}"
        kind, what = rng.choice(moves)
        if kind == "start":
            running[next_group] = rollouts[what]
            next_group += 1
            admitted += 1
        elif kind == "pull":
            rollouts[what] = rng.randint(rollouts[what] + 1, version)
        elif kind == "finish":
            made = running.pop(what)
            if rng.random() < 0.1:
                admitted -= 1  # dropped
            else:
                ready[what] = made
        else:
            for group in chosen:
                assert version - ready.pop(group) <= bound
            version += 1

"""Every schedule with every strategy, in worlds of random order, failures, evictions and restarts of the trainer."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.controller.schedules.in_order import InOrderSchedule
from laminar.controller.schedules.laminar import LaminarSchedule
from laminar.controller.schedules.one_step import OneStepSchedule
from laminar.controller.schedules.stream import StreamSchedule
from tests.controller.schedules.schedule_world import SCHEDULES, STRATEGIES, Setting, World, make


@st.composite
def worlds(draw, name, faults=True):
    """Settings in which the schedule `name` may be used."""
    parts = draw(st.integers(1, 3)) if name == "stream" else 1
    batch = parts * draw(st.integers(1, 4 if parts == 1 else 2))
    in_order = name in ("synchronous", "one_step", "stream")
    bounds = {"synchronous": st.just(0), "one_step": st.integers(1, 3), "stream": st.integers(1, 3)}
    bound = draw(bounds.get(name, st.none() | st.integers(0, 4)))
    steps = draw(st.integers(1, 8))
    least = batch * (bound + 1) if in_order else batch
    return Setting(
        name=name,
        strategy=draw(st.sampled_from(STRATEGIES)),
        batch=batch,
        parts=parts,
        bound=bound,
        steps=steps,
        rollouts=draw(st.integers(1, 4)),
        prompts=draw(st.none() | st.integers(1, batch * (steps + 1))),
        drops=draw(st.integers(0, 5)) if faults else 0,
        losses=draw(st.integers(0, 3)) if faults else 0,
        on_stale=draw(st.sampled_from(("drop", "train"))),
        capacity=draw(st.none() | st.integers(least, least + 3)) if faults else None,
        max_age=draw(st.none() | st.integers(0, 3)) if faults else None,
        finish=draw(st.sampled_from(("any", "newest", "oldest"))),
        seed=draw(st.integers(0, 2**32)),
    )


same_every_time = settings(max_examples=300, derandomize=True, database=None)


@pytest.mark.parametrize("name", SCHEDULES)
def test_staleness_is_bounded_and_nothing_dead_locks(name):
    @same_every_time
    @given(worlds(name))
    def check(setting):
        world = World(setting, make(setting)).run()
        if setting.prompts is None:
            assert len(world.history) == setting.steps

    check()


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_faults_every_group_is_trained_once(name):
    @same_every_time
    @given(worlds(name, faults=False))
    def check(setting):
        world = World(setting, make(setting)).run()
        trained = sorted(group.group_id for groups in world.history for group in groups)
        wanted = setting.batch * setting.steps
        assert trained == list(range(min(wanted, wanted if setting.prompts is None else setting.prompts)))

    check()


@pytest.mark.parametrize("name", ["laminar", "partial", "one_step", "stream"])
def test_the_bound_is_reached_so_it_is_not_tighter_than_it_says(name):
    reached = {
        max(World(setting, make(setting)).run().staleness)
        for setting in (
            Setting(name=name, strategy="freshest", bound=2, rollouts=3, finish="newest", seed=seed)
            for seed in range(40)
        )
    }
    assert max(reached) == 2


@pytest.mark.parametrize("name", ["laminar", "one_step"])
def test_after_a_loss_stale_groups_are_dropped_or_trained_late(name):
    def worlds(on_stale):
        return [
            World(setting, make(setting)).run()
            for setting in (
                Setting(name=name, bound=1, rollouts=3, losses=2, on_stale=on_stale, seed=seed) for seed in range(40)
            )
        ]

    dropped, late = worlds("drop"), worlds("train")
    assert any(world.admitted < world.started for world in dropped)
    assert max(max(world.staleness) for world in dropped) == 1
    assert all(world.admitted == world.started for world in late)
    assert max(max(world.staleness) for world in late) > 1


# Schedules with one mistake each. The worlds have to find every one of them, or the tests above would prove nothing.


class AdmitsOneTooMany(LaminarSchedule):
    def room(self, *, outstanding, **rest):
        return super().room(outstanding=outstanding - 1, **rest)


class ForgetsWhatIsTaken(LaminarSchedule):
    def room(self, *, taken, **rest):
        return super().room(taken=0, **rest)


class HasNoObligations(LaminarSchedule):
    def _obligations(self, outstanding, published_version):
        return []


class ObligesOneStepLate(LaminarSchedule):
    def _obligations(self, outstanding, published_version):
        return super()._obligations(outstanding, published_version - 1)


class ObligesToMoreThanAStep(LaminarSchedule):
    def _obligations(self, outstanding, published_version):
        many = super()._obligations(outstanding, published_version)
        return [(version, sum(made <= version for made in outstanding.values())) for version, _ in many]


class DropsOneTooFew(LaminarSchedule):
    def stale(self, outstanding, *, published_version):
        return super().stale(outstanding, published_version=published_version)[1:]


class TakesWhatIsReady(InOrderSchedule):
    def select(self, ready, outstanding, **about):
        return super().select(ready, {group.group_id: group.policy_version for group in ready}, **about)


class OneStepTakesWhatIsReady(TakesWhatIsReady, OneStepSchedule):
    pass


class StreamTakesWhatIsReady(TakesWhatIsReady, StreamSchedule):
    pass


@pytest.mark.parametrize(
    "name, kind",
    [
        ("laminar", AdmitsOneTooMany),
        ("laminar", ForgetsWhatIsTaken),
        ("laminar", HasNoObligations),
        ("laminar", ObligesOneStepLate),
        ("laminar", ObligesToMoreThanAStep),
        ("laminar", DropsOneTooFew),
        ("one_step", OneStepTakesWhatIsReady),
        ("stream", StreamTakesWhatIsReady),
    ],
)
def test_the_worlds_find_a_mistake(name, kind):
    with pytest.raises(AssertionError, match="policy_version=|dead-lock"):
        for seed in range(300):
            rng = random.Random(seed)
            setting = Setting(
                name=name,
                strategy=rng.choice(STRATEGIES),
                batch=2,
                parts=2 if name == "stream" else 1,
                bound=rng.randint(1, 2),
                steps=8,
                rollouts=3,
                losses=2 if kind in (ForgetsWhatIsTaken, DropsOneTooFew, ObligesToMoreThanAStep) else 0,
                on_stale="train" if kind is ObligesToMoreThanAStep else "drop",
                finish=rng.choice(("any", "newest")),
                seed=seed,
            )
            World(setting, make(setting, {name: kind})).run()

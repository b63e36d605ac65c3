"""The repack planner: who is a source, best fit against a brute-force reference, and its invariants."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.controller.repack_planner import Move, RepackBounds, RolloutObservation, plan

BOUNDS = RepackBounds(kv_ceiling=0.9, batch_bound=32)


def rollout(name, kv=0.2, running=4, **overrides):
    """A rollout past its peak."""
    fields = {
        "policy_version": 3,
        "waiting": 0,
        "previous_kv_utilization": 1.0,
        "previous_running": running,
        "draining": True,
    }
    return RolloutObservation(rollout=name, kv_utilization=kv, running=running, **(fields | overrides))


def moves(observations, bounds=BOUNDS):
    return [(move.source, move.target) for move in plan(observations, bounds).moves]


def test_the_emptiest_goes_to_the_fullest_that_can_take_it():
    assert moves([rollout("a", 0.1), rollout("b", 0.5), rollout("c", 0.85), rollout("d", 0.3)]) == [
        ("a", "b"),  # c has no room
        ("d", "b"),  # 0.6 + 0.3 fits exactly
    ]


def test_merges_already_planned_count_against_both_bounds():
    # KV: b holds 0.5 + 0.3 after the first merge.
    assert moves([rollout("a", 0.3), rollout("b", 0.5), rollout("c", 0.35)]) == [("a", "b")]
    # Requests: 12 + 12 leave no room for 12 more.
    three = [rollout(name, kv, running=12) for name, kv in (("a", 0.1), ("b", 0.12), ("c", 0.11))]
    assert moves(three) == [("a", "b")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"running": 0}, "no trajectory runs on it"),
        ({"kv": 0.9}, "its KV utilization 0.90 is at the ceiling 0.90"),
        ({"running": 20, "waiting": 12}, "its 32 trajectories fill the batch bound 32"),
        ({"previous_kv_utilization": 0.2, "previous_running": 3}, "its load still grows"),
        ({"previous_kv_utilization": 0.2, "waiting": 1}, "its load still grows"),
    ],
)
def test_a_rollout_that_is_not_past_its_peak_is_neither_source_nor_target(change, reason):
    result = plan([rollout("a", **change), rollout("b", 0.4)], BOUNDS)
    assert result.moves == ()
    assert result.reasons == {"a": reason, "b": "no other rollout of version 3 is past its peak"}


@pytest.mark.parametrize("before", [1, 2])
def test_a_lone_straggler_whose_kv_only_grows_is_a_source(before):
    straggler = rollout("a", 0.1, running=1, previous_kv_utilization=0.08, previous_running=before)
    assert moves([straggler, rollout("b", 0.4)]) == [("a", "b")]


def test_only_a_draining_rollout_is_emptied_but_any_may_receive():
    result = plan([rollout("a", 0.1, draining=False), rollout("b", 0.2)], BOUNDS)
    assert result.moves == (Move(source="b", target="a"),)
    assert result.reasons == {"a": "it takes in others"}
    result = plan([rollout("a", 0.1, draining=False), rollout("b", 0.2, draining=False)], BOUNDS)
    assert result.moves == ()
    assert set(result.reasons.values()) == {"it takes new prompts, so emptying it frees nothing"}


def test_of_two_that_fit_the_fuller_counts_even_if_it_has_fewer_requests():
    assert moves([rollout("a", 0.1, 12), rollout("b", 0.2, 20), rollout("c", 0.3, 10)]) == [("a", "c")]
    assert moves([rollout("a", 0.1, 12), rollout("b", 0.2, 20), rollout("c", 0.3, 25)]) == [("a", "b")]


def test_equals_are_taken_by_name():
    observations = [rollout(name, 0.25) for name in "dbca"]
    assert moves(observations) == [("a", "b"), ("c", "b")]
    assert moves(observations[::-1]) == moves(observations)


def test_a_source_that_nobody_has_room_for_says_so():
    result = plan([rollout("a", 0.5), rollout("b", 0.6)], BOUNDS)
    assert result.moves == ()
    assert result.reasons["a"] == "none of the 1 others of version 3 has room for its trajectories below both bounds"


def test_a_move_that_costs_more_than_it_frees_is_not_made():
    bounds = RepackBounds(kv_ceiling=0.9, batch_bound=32, move_s_per_token=0.001)
    soon = rollout("a", 0.1, context_tokens=5_000, drains_in_s=4.0)
    late = rollout("b", 0.2, context_tokens=5_000, drains_in_s=60.0)
    unknown = rollout("c", 0.35, context_tokens=5_000)
    result = plan([soon, late, unknown, rollout("d", 0.5)], bounds)
    assert result.moves == (
        Move(source="b", target="d", context_tokens=5_000, frees_s=60.0, costs_s=5.0),
        Move(source="c", target="a", context_tokens=5_000, frees_s=None, costs_s=5.0),
    )
    # One that is not worth emptying may still take others in.
    assert result.reasons["a"] == "it takes in others"
    alone = plan([soon, rollout("d", 0.9)], bounds)
    assert (
        alone.reasons["a"] == "moving its 5000 tokens of context costs the target 5 s, and it drains in 4 s by itself"
    )
    # Nothing is measured yet: then nothing speaks against it.
    assert plan([soon, rollout("d", 0.35)], BOUNDS).moves[0] == Move(
        source="a", target="d", context_tokens=5_000, frees_s=4.0, costs_s=None
    )


def test_no_more_are_freed_than_are_wanted():
    observations = [rollout(name, 0.1) for name in "abcdef"]
    for wanted, freed in ((0, 0), (2, 2), (9, 5)):
        result = plan(observations, RepackBounds(kv_ceiling=0.9, batch_bound=32, wanted=wanted, why_no_more="enough"))
        assert len(result.moves) == freed
        assert list(result.reasons.values()).count("enough") == 6 - freed - (freed > 0)


def test_degrees_of_tensor_parallelism_do_not_mix():
    assert moves([rollout("a", 0.1), rollout("b", 0.2, tensor_parallel=2), rollout("c", 0.3)]) == [("a", "c")]


def test_versions_do_not_mix():
    assert moves([rollout("a", 0.1), rollout("b", 0.2, policy_version=4), rollout("c", 0.3)]) == [("a", "c")]
    assert plan([], BOUNDS).moves == ()


# ---------------------------------------------------------------- against a reference, on any input


def reference(observations, bounds):
    """Algorithm 1 as it reads, O(n^2)."""
    result = []
    for version in sorted({each.policy_version for each in observations}):
        candidates = [
            each
            for each in observations
            if each.policy_version == version
            and each.running > 0
            and each.kv_utilization < bounds.kv_ceiling
            and each.running + each.waiting < bounds.batch_bound
            and (
                each.kv_utilization < each.previous_kv_utilization
                or (each.waiting == 0 and each.running <= each.previous_running)
            )
        ]
        candidates.sort(key=lambda each: (each.kv_utilization, each.rollout))
        kv = {each.rollout: each.kv_utilization for each in candidates}
        requests = {each.rollout: each.running + each.waiting for each in candidates}
        emptied, filled = set(), set()
        for source in [each.rollout for each in candidates if each.draining]:
            if source in filled:
                continue
            best = None
            for each in candidates:
                name = each.rollout
                fits = (
                    kv[name] + kv[source] <= bounds.kv_ceiling
                    and requests[name] + requests[source] <= bounds.batch_bound
                )
                if name != source and name not in emptied and fits and (best is None or kv[name] > kv[best]):
                    best = name
            if best is not None:
                kv[best] += kv[source]
                requests[best] += requests[source]
                emptied.add(source)
                filled.add(best)
                result.append((source, best))
    return result


@st.composite
def clusters(draw):
    """Hundreds of rollouts or a few; utilizations that often tie or add up to the ceiling exactly."""
    steps = draw(st.sampled_from([10, 1000, 1_000_000_007]))
    count = draw(st.one_of(st.integers(0, 12), st.integers(100, 300)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bound = draw(st.integers(1, 40))
    most_kv = draw(st.sampled_from([1.0, 0.2, 0.01]))  # low: the batch bound decides
    versions = draw(st.integers(1, 3))
    observations = [
        RolloutObservation(
            rollout=f"rollout-{index}",
            policy_version=int(rng.integers(versions)),
            running=int(rng.integers(0, bound + 2)),
            waiting=int(rng.integers(3)) if rng.random() < 0.2 else 0,
            kv_utilization=int(rng.integers(steps + 1)) / steps * most_kv,
            previous_kv_utilization=float(rng.random()),
            previous_running=int(rng.integers(0, bound + 2)),
            draining=bool(rng.random() < 0.8),
        )
        for index in rng.permutation(count)
    ]
    return observations, RepackBounds(kv_ceiling=draw(st.sampled_from([0.3, 0.9, 1.0])), batch_bound=bound)


@given(clusters())
def test_a_plan_is_the_reference_and_keeps_every_bound(cluster):
    observations, bounds = cluster
    result = plan(observations, bounds)
    pairs = [(move.source, move.target) for move in result.moves]
    assert pairs == reference(observations, bounds)
    by_name = {each.rollout: each for each in observations}
    sources, targets = [source for source, _ in pairs], {target for _, target in pairs}
    assert len(sources) == len(set(sources))
    assert not targets & set(sources)
    assert result.reasons.keys() == by_name.keys() - set(sources)
    for target in targets:
        members = [by_name[target], *(by_name[source] for source, to in pairs if to == target)]
        assert {each.policy_version for each in members} == {by_name[target].policy_version}
        assert sum(each.kv_utilization for each in members) <= bounds.kv_ceiling + 1e-9
        assert sum(each.requests for each in members) <= bounds.batch_bound
        assert all(each.draining for each in members[1:])


@pytest.mark.parametrize("most_kv", [0.9, 0.002])
def test_a_thousand_rollouts_are_planned_in_milliseconds(most_kv):
    rng = np.random.default_rng(0)
    observations = [
        rollout(f"rollout-{index}", float(rng.random()) * most_kv, int(rng.integers(1, 32))) for index in range(1024)
    ]
    times = []
    for _ in range(5):
        began = time.process_time()
        result = plan(observations, BOUNDS)
        times.append(time.process_time() - began)
    assert len(result.moves) > 300
    assert min(times) < 0.05  # some 6 ms; a quadratic search takes 150

"""Leases, versions and finishes of trajectories in progress."""

import numpy as np
import pytest

from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.errors import RunFailed
from laminar.protocol.messages import RolloutLoad, TrajectoryDeltas
from laminar.trajectory import MAX_PIECES, Prompt, Trajectory, TrajectoryState


def trajectory(trajectory_id="0.0") -> Trajectory:
    prompt = Prompt(prompt_id=0, source="s", text="", token_ids=np.array([1], np.int32), answer="", metadata="{}")
    return Trajectory(trajectory_id=trajectory_id, group_id=0, prompt=prompt)


def message(*deltas, version=3, logprobs=None):
    """Of deltas (trajectory id, lease, start, tokens, finish reason)."""
    ids, leases, starts, tokens, reasons = zip(*deltas, strict=True)
    token_ids = np.array([token for some in tokens for token in some], np.int32)
    return TrajectoryDeltas(
        policy_version=version,
        trajectory_ids=ids,
        leases=leases,
        starts=np.array(starts, np.int32),
        token_counts=np.array([len(some) for some in tokens], np.int32),
        token_ids=token_ids,
        logprobs=np.full(len(token_ids), -0.5, np.float32) if logprobs is None else np.array(logprobs, np.float32),
        finish_reasons=reasons,
        load=RolloutLoad(running=0, waiting=0, kv_utilization=0.0),
    )


def delta(pool, *, lease=1, version=3, start=0, tokens=(5, 6), finish=None):
    """Take in one delta of trajectory 0.0; the trajectory if that ended it."""
    ended = pool.take_in(message(("0.0", lease, start, tokens, finish), version=version), now=9.0)
    return ended[0] if ended else None


def test_collects_tokens_until_the_finish():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    assert delta(pool) is None
    assert delta(pool, start=2, tokens=(7,), finish="stop") is one
    assert one.response_token_ids().tolist() == [5, 6, 7]
    assert one.state is TrajectoryState.FINISHED
    assert (one.policy_version, one.finish_reason, one.started_at, one.finished_at) == (3, "stop", 1.0, 9.0)
    assert len(pool) == 0


def test_drops_and_counts_what_comes_under_an_old_lease():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    delta(pool)
    pool.orphan(one)
    assert pool.take_waiting("rollout-1", 3, 8) == [one]
    pool.lease(one, rollout="rollout-1", policy_version=3, now=2.0)
    assert delta(pool, lease=1, tokens=(8, 9), finish="stop") is None
    assert pool.late_tokens == 2
    assert one.num_tokens == 2
    assert one.state is TrajectoryState.GENERATING


def test_drops_a_delta_that_comes_twice_and_refuses_one_that_leaves_tokens_out():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    delta(pool)
    assert delta(pool) is None
    assert (one.num_tokens, pool.late_tokens) == (2, 2)
    with pytest.raises(RunFailed, match="rollout-0 sent tokens of trajectory 0.0 from number 5 on; only 2 had come"):
        delta(pool, start=5)


def test_a_stopped_trajectory_waits_for_its_destination_with_all_its_tokens():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    assert delta(pool, finish="abort") is one
    pool.destine(one, "rollout-1")
    assert one.state is TrajectoryState.MIGRATING
    assert pool.take_waiting("rollout-0", 3, 8) == []
    assert pool.take_waiting("rollout-1", 3, 8) == [one]
    pool.lease(one, rollout="rollout-1", policy_version=3, now=2.0)
    assert delta(pool, lease=2, start=2, tokens=(7,), finish="stop") is one
    assert one.response_token_ids().tolist() == [5, 6, 7]
    assert (len(pool), pool.late_tokens) == (0, 0)


def test_a_rollout_that_holds_more_than_it_may_takes_nothing():
    pool = PartialResponsePool()
    waiting = [trajectory(f"0.{member}") for member in range(3)]
    for one in waiting:
        pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
        pool.take_in(message((one.trajectory_id, 1, 0, (5,), "abort")), 2.0)
        pool.destine(one, "rollout-1")
    assert pool.take_waiting("rollout-1", 3, -1) == []
    assert pool.take_waiting("rollout-1", 3, 2) == waiting[:2]


def test_an_orphan_goes_to_a_rollout_of_its_version_or_starts_over_with_a_newer_one():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    delta(pool)
    pool.orphan(one)
    assert pool.has_orphans_for(3)
    assert not pool.has_orphans_for(4)
    assert pool.start_over(one) == 2
    assert not pool.has_orphans_for(2)
    assert pool.take_waiting("rollout-1", 4, 8) == [one]
    pool.lease(one, rollout="rollout-1", policy_version=4, now=2.0)
    assert (one.policy_version, one.num_tokens, one.versions) == (4, 0, [(4, 0)])


def test_under_partial_a_trajectory_goes_on_with_newer_weights_and_says_from_which_token():
    pool, one = PartialResponsePool(mixes_versions=True), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    delta(pool, finish="abort")
    pool.destine(one, "rollout-0")
    assert pool.take_waiting("rollout-0", 4, 8) == [one]
    pool.lease(one, rollout="rollout-0", policy_version=4, now=2.0)
    delta(pool, lease=2, version=4, start=2, tokens=(7,), finish="stop")
    assert (one.policy_version, one.versions, one.num_tokens) == (3, [(3, 0), (4, 2)], 3)


def test_drops_what_comes_after_the_finish():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    delta(pool, finish="length")
    assert delta(pool, finish="length") is None
    assert one.num_tokens == 2
    assert pool.late_tokens == 2


def test_refuses_tokens_of_another_version():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    with pytest.raises(RunFailed, match="rollout-0 .* trajectory 0.0 with version 4; it was leased for version 3"):
        delta(pool, version=4)


def test_refuses_a_lease_on_a_rollout_of_another_version():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    pool.orphan(one)
    assert pool.take_waiting("rollout-1", 4, 8) == []
    with pytest.raises(RuntimeError, match="version 3 leased to rollout-1, which serves version 4"):
        pool.lease(one, rollout="rollout-1", policy_version=4, now=2.0)


def test_refuses_logprobs_that_are_not_finite():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    pool.lease(two := trajectory("0.1"), rollout="rollout-0", policy_version=3, now=1.0)
    pool.lease(trajectory("0.2"), rollout="rollout-0", policy_version=3, now=1.0)
    late = message(("0.0", 1, 0, (5, 6), None), ("0.1", 7, 0, (5, 6), None), logprobs=[-1, -1, float("nan"), -1])
    assert pool.take_in(late, now=2.0) == []
    assert (one.num_tokens, two.num_tokens, pool.late_tokens) == (2, 0, 2)  # what is dropped is not looked at
    bad = message(("0.1", 1, 0, (5, 6), None), ("0.2", 1, 0, (5, 6), None), logprobs=[-1, -1, -1, float("-inf")])
    with pytest.raises(RunFailed, match=r"rollout-0 sent a logprob that is not finite for trajectory 0\.2"):
        pool.take_in(bad, now=2.0)


def test_one_message_brings_deltas_of_many():
    pool = PartialResponsePool()
    four = [trajectory(f"0.{member}") for member in range(4)]
    for one in four:
        pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    deltas = message(
        ("0.3", 1, 0, (1, 2, 3), "stop"),
        ("0.0", 1, 0, (), None),
        ("9.9", 1, 0, (8, 8), "stop"),  # nobody knows it
        ("0.1", 1, 0, (4,), "abort"),
        ("0.2", 1, 0, (5, 6), None),
        logprobs=[-1, -2, -3, -8, -8, -4, -5, -6],
    )
    assert pool.take_in(deltas, now=9.0) == [four[3], four[1]]
    assert [one.response_token_ids().tolist() for one in four] == [[], [4], [5, 6], [1, 2, 3]]
    assert [one.response_logprobs().tolist() for one in four] == [[], [-4], [-5, -6], [-1, -2, -3]]
    assert [one.state.value for one in four] == ["generating", "generating", "generating", "finished"]
    assert (pool.late_tokens, len(pool)) == (2, 3)


def test_small_pieces_are_joined_at_the_end_and_large_ones_stay():
    pool, one, two = PartialResponsePool(), trajectory(), trajectory("0.1")
    for each in (one, two):
        pool.lease(each, rollout="rollout-0", policy_version=3, now=1.0)
    for start in (0, 600):
        reason = "stop" if start else None
        large = message(("0.0", 1, start, range(600), reason), ("0.1", 1, start // 100, range(6), reason))
        assert pool.take_in(large, now=2.0) == ([one, two] if start else [])
    assert [len(piece) for piece in one.token_ids] == [len(piece) for piece in one.logprobs] == [600, 600]
    assert np.shares_memory(one.token_ids[1], large.token_ids)
    assert [len(piece) for piece in two.token_ids] == [len(piece) for piece in two.logprobs] == [12]
    assert two.response_token_ids().tolist() == [*range(6), *range(6)]


def test_pieces_are_kept_as_they_are_up_to_a_bound():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    whole = message(("0.0", 1, 0, range(100), None))
    pool.take_in(whole, now=2.0)
    assert np.shares_memory(one.token_ids[0], whole.token_ids)  # not copied
    for start in range(100, 100 + 3 * MAX_PIECES):
        delta(pool, start=start, tokens=(start,))
        assert len(one.token_ids) == len(one.logprobs) <= MAX_PIECES
    assert not any(np.shares_memory(piece, whole.token_ids) for piece in one.token_ids)
    assert one.response_token_ids().tolist() == list(range(100 + 3 * MAX_PIECES))
    assert len(one.response_logprobs()) == one.num_tokens

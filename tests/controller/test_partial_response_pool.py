"""Leases, versions and finishes of trajectories in progress."""

import numpy as np
import pytest

from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.errors import RunFailed
from laminar.trajectory import Prompt, Trajectory, TrajectoryState


def trajectory() -> Trajectory:
    prompt = Prompt(prompt_id=0, source="s", text="", token_ids=np.array([1], np.int32), answer="", metadata="{}")
    return Trajectory(trajectory_id="0.0", group_id=0, prompt=prompt)


def delta(pool, *, lease=1, version=3, tokens=(5, 6), finish=None, logprob=-0.5):
    return pool.take_in(
        "0.0",
        lease=lease,
        policy_version=version,
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), logprob, np.float32),
        finish_reason=finish,
        now=9.0,
    )


def test_collects_tokens_until_the_finish():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    assert delta(pool) is None
    assert delta(pool, tokens=(7,), finish="stop") is one
    assert one.response_token_ids().tolist() == [5, 6, 7]
    assert one.state is TrajectoryState.FINISHED
    assert (one.policy_version, one.finish_reason, one.started_at, one.finished_at) == (3, "stop", 1.0, 9.0)
    assert len(pool) == 0


def test_drops_and_counts_what_comes_under_an_old_lease():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    delta(pool)
    one.move_to(TrajectoryState.QUEUED)
    pool.lease(one, rollout="rollout-1", policy_version=3, now=2.0)
    assert delta(pool, lease=1, tokens=(8, 9), finish="stop") is None
    assert pool.late_tokens == 2
    assert one.num_tokens == 2
    assert one.state is TrajectoryState.GENERATING


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
    with pytest.raises(RunFailed, match="rollout-0 .* trajectory 0.0 with version 4; it belongs to version 3"):
        delta(pool, version=4)


def test_refuses_a_lease_on_a_rollout_of_another_version():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    one.move_to(TrajectoryState.QUEUED)
    with pytest.raises(RuntimeError, match="version 3 leased to rollout-1, which serves version 4"):
        pool.lease(one, rollout="rollout-1", policy_version=4, now=2.0)


def test_refuses_logprobs_that_are_not_finite():
    pool, one = PartialResponsePool(), trajectory()
    pool.lease(one, rollout="rollout-0", policy_version=3, now=1.0)
    with pytest.raises(RunFailed, match="not finite for trajectory 0.0"):
        delta(pool, logprob=float("nan"))

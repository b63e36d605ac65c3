"""Deltas of many streams become one message."""

import numpy as np
import pytest

from laminar.protocol.messages import RolloutLoad
from laminar.workers.rollout.delta_batch import DeltaBatch
from laminar.workers.rollout.engine import EngineDelta

LOAD = RolloutLoad(running=1, waiting=0, kv_utilization=0.5)


def delta(tokens, *, version=3, finish=None):
    return EngineDelta(
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        policy_version=version,
        finish_reason=finish,
    )


def test_tokens_of_a_trajectory_are_joined_in_order():
    batch = DeltaBatch()
    batch.add("a", 1, 0, delta([1, 2]))
    batch.add("b", 4, 9, delta([7]))
    batch.add("a", 1, 2, delta([3], finish="stop"))
    message = batch.take(LOAD)
    assert (message.trajectory_ids, message.leases) == (("a", "b"), (1, 4))
    assert message.starts.tolist() == [0, 9]
    assert message.token_counts.tolist() == [3, 1]
    assert message.token_ids.tolist() == [1, 2, 3, 7]
    assert message.logprobs.tolist() == [-1, -2, -3, -7]
    assert message.finish_reasons == ("stop", None)
    assert (message.policy_version, message.load) == (3, LOAD)


def test_what_was_taken_is_not_sent_again():
    batch = DeltaBatch()
    assert batch.take(LOAD) is None
    batch.add("a", 1, 0, delta([1]))
    batch.take(LOAD)
    assert batch.take(LOAD) is None
    batch.add("a", 1, 1, delta([2], version=4))
    assert batch.take(LOAD).token_ids.tolist() == [2]


def test_versions_are_never_mixed_in_one_message():
    batch = DeltaBatch()
    batch.add("a", 1, 0, delta([1]))
    with pytest.raises(RuntimeError, match="trajectory b: the engine served version 4 while deltas of version 3"):
        batch.add("b", 1, 0, delta([1], version=4))

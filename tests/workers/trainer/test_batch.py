from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from laminar.errors import RunFailed
from laminar.workers.trainer.batch import StepBatch
from tests.workers.trainer.batches import random_step, trajectories


def test_micro_batch_holds_exactly_the_loss_tokens():
    message = random_step(seed=3)
    batch = StepBatch(message)
    rows = [1, 7, 10]
    micro_batch = batch.micro_batch(rows)
    naive = list(trajectories(message))
    width = micro_batch.token_ids.shape[1]
    assert width == max(len(naive[row][0]) for row in rows)
    expected_positions, expected_targets, expected_logprobs, expected_trajectories = [], [], [], []
    for index, row in enumerate(rows):
        token_ids, prompt, mask, engine = naive[row]
        assert micro_batch.token_ids[index, : len(token_ids)].tolist() == token_ids.tolist()
        for t in range(len(mask)):
            if mask[t]:
                expected_positions.append(index * width + prompt + t - 1)
                expected_targets.append(token_ids[prompt + t].item())
                expected_logprobs.append(engine[t].item())
                expected_trajectories.append(index)
    assert micro_batch.positions.tolist() == expected_positions
    assert micro_batch.targets.tolist() == expected_targets
    assert micro_batch.engine_logprobs.tolist() == expected_logprobs
    assert micro_batch.trajectories.tolist() == expected_trajectories
    assert message.engine_logprobs[micro_batch.places].tolist() == expected_logprobs
    assert message.loss_mask[micro_batch.places].all()
    assert micro_batch.tokens == sum(len(naive[row][0]) for row in rows)
    assert micro_batch.loss_mask.all()
    assert batch.loss_tokens(rows).tolist() == [int(naive[row][2].sum()) for row in rows]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_is_in_one_micro_batch_of_one_rank(ranks):
    batch = StepBatch(random_step(groups=5, seed=4))
    rows = []
    for mini_batch in batch.mini_batches(2):
        groups = set(batch.message.group_ids[mini_batch])
        assert all((batch.message.group_ids == group).sum() == 4 for group in groups)
        for rank in range(ranks):
            packed = batch.pack(batch.share(mini_batch, rank, ranks), 64, at_least=5)
            assert len(packed) >= 5
            rows += [row for micro_batch in packed for row in micro_batch]
    assert sorted(rows) == list(range(20))


def test_budget_holds_and_a_longer_row_makes_one_alone():
    batch = StepBatch(random_step(seed=5))
    longest = int(batch.lengths.max())
    for rows in batch.pack(list(range(16)), longest - 1):
        assert len(rows) * batch.lengths[rows].max() <= longest


def test_number_of_micro_batches_weighs_padding_against_passes():
    lengths = {"prompts": 2, "responses": [2, 2, 2, 2, 98, 98, 98, 98]}
    message = random_step(groups=2, masked=False)
    responses = np.array(lengths["responses"], np.int32)
    message = dataclasses.replace(
        message,
        prompt_lengths=np.full(8, lengths["prompts"], np.int32),
        response_lengths=responses,
        token_ids=np.zeros(16 + responses.sum(), np.int32),
        loss_mask=np.ones(responses.sum(), np.uint8),
        engine_logprobs=np.zeros(responses.sum(), np.float32),
    )
    batch = StepBatch(dataclasses.replace(message))
    rows = list(range(8))
    assert batch.best_number(rows, 10_000, pass_cost=0) == 2  # 4 * 4 + 4 * 100 tokens, no padding
    assert batch.best_number(rows, 10_000, pass_cost=1000) == 1  # 8 * 100 tokens
    assert batch.best_number(rows, 200, pass_cost=1000) == 3  # the budget allows two long ones together
    assert batch.best_number([], 200, pass_cost=10) == 0


def test_trajectories_without_loss_tokens_are_not_numbered():
    message = random_step(seed=3, lengths=(0, 2), masked=False)
    empty, full = (np.flatnonzero(message.response_lengths == length).tolist() for length in (0, 1))
    micro_batch = StepBatch(message).micro_batch([*empty[:2], full[0], empty[2], full[1]])
    assert micro_batch.trajectories.tolist() == [0, 1]


def test_weights_are_those_of_the_mini_batch():
    batch = StepBatch(random_step(groups=4, seed=3))
    mini_batches = batch.mini_batches(2)
    for aggregation in ("token", "trajectory"):
        weights = batch.token_weights(mini_batches, aggregation=aggregation, max_response_tokens=20)
        for rows in mini_batches:
            mine = np.isin(np.repeat(np.arange(len(batch.lengths)), batch.response_lengths), rows)
            assert weights[mine & batch.in_loss].sum() == pytest.approx(1.0, rel=1e-5)


def test_fewer_groups_than_mini_batches():
    assert len(StepBatch(random_step(groups=2)).mini_batches(4)) == 2


def test_dummy_counts_nothing():
    dummy = StepBatch(random_step()).micro_batch([])
    assert not dummy.loss_mask.any()
    assert dummy.tokens == 0


def test_engine_logprob_that_is_not_finite_names_step_and_place():
    message = random_step(step=7, masked=False)
    engine = message.engine_logprobs.copy()
    place = int(message.response_lengths[:3].sum())
    engine[place] = np.nan
    with pytest.raises(RunFailed, match=r"step 7: engine_logprobs .*trajectory 3 .*group 700\), token 0 "):
        StepBatch(dataclasses.replace(message, engine_logprobs=engine))


def test_masked_engine_logprobs_may_be_anything():
    message = random_step()
    engine = np.where(message.loss_mask == 1, message.engine_logprobs, np.nan).astype(np.float32)
    StepBatch(dataclasses.replace(message, engine_logprobs=engine))


def test_reward_that_is_not_finite():
    message = random_step(step=7)
    rewards = message.rewards.copy()
    rewards[2] = np.inf
    with pytest.raises(RunFailed, match=r"step 7: reward is not finite: rewards\[2\]"):
        StepBatch(dataclasses.replace(message, rewards=rewards))


def test_arrays_that_do_not_fit():
    message = random_step(step=7)
    with pytest.raises(RunFailed, match="step 7: the arrays"):
        StepBatch(dataclasses.replace(message, token_ids=message.token_ids[:-1]))
    with pytest.raises(RunFailed, match="step 7: the arrays"):
        StepBatch(dataclasses.replace(message, rewards=message.rewards[:-1]))

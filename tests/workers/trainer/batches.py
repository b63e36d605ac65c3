"""Batches of made-up trajectories for the trainer's tests."""

from __future__ import annotations

import numpy as np
import torch

from laminar.protocol.messages import TrainStep


def random_step(
    step=1, *, order=1, groups=4, group_size=4, seed=0, masked=True, lengths=(1, 20), mini_batches=1
) -> TrainStep:
    """Random trajectories of widely varying length; some response tokens are not the policy's."""
    random = np.random.default_rng(seed)
    number = groups * group_size
    prompt_lengths = np.repeat(random.integers(2, 9, groups), group_size).astype(np.int32)
    response_lengths = random.integers(*lengths, number).astype(np.int32)
    responses = int(response_lengths.sum())
    return TrainStep(
        order=order,
        step=step,
        part=0,
        mini_batches=mini_batches,
        publish_version=step,
        group_ids=np.repeat(np.arange(groups) + 100 * step, group_size).astype(np.int64),
        rewards=random.random(number).astype(np.float32),
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        token_ids=random.integers(0, 256, int(prompt_lengths.sum()) + responses).astype(np.int32),
        loss_mask=(random.random(responses) < (0.8 if masked else 2)).astype(np.uint8),
        engine_logprobs=(-5.7 + random.normal(0, 0.3, responses)).astype(np.float32),
        staleness=np.zeros(number, np.int32),
    )


def trajectories(message):
    """(prompt + response token ids, prompt length, loss mask, engine logprobs) of each trajectory, cut out naively."""
    token, response = 0, 0
    for prompt_length, response_length in zip(message.prompt_lengths, message.response_lengths, strict=True):
        end = response + response_length
        ids = torch.tensor(message.token_ids[token : token + prompt_length + response_length]).long()
        mask = torch.tensor(message.loss_mask[response:end]).bool()
        yield ids, int(prompt_length), mask, torch.tensor(message.engine_logprobs[response:end])
        token += prompt_length + response_length
        response = end


def parameters_of(actor):
    return {name: parameter.detach().clone() for name, parameter in actor.model.named_parameters()}


def largest_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)

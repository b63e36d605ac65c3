from __future__ import annotations

import math

import pytest
import torch

from laminar.algorithms.importance_sampling import importance_weight_metrics, masked_weights, truncated_weights
from tests.algorithms.random_tokens import random_tokens

LEVELS = ("token", "trajectory", "geometric")


def weights_of(function, trainer, engine, *, mask=None, trajectories=None, **options):
    trainer, engine = torch.tensor(trainer), torch.tensor(engine)
    mask = torch.ones(len(trainer)) if mask is None else torch.tensor(mask)
    trajectories = torch.zeros(len(trainer)).long() if trajectories is None else torch.tensor(trajectories)
    return function(trainer, engine, mask, trajectories, **options)


def test_truncated_weights_by_hand():
    trainer = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    engine = torch.tensor([-1.0, -1.0 - math.log(1.5), -4.0, -1.0 + math.log(2)])
    got = truncated_weights(trainer, engine, torch.ones(4), torch.zeros(4).long())
    # The engine thought a token less probable than the trainer does: weighed up, to 2 at most.
    torch.testing.assert_close(got.weights, torch.tensor([1.0, 1.5, 2.0, 0.5]))
    assert got.cut.tolist() == [False, False, True, False]
    assert not got.weights.requires_grad


def test_masked_weights_by_hand():
    ratios = [1.0, 1.5, 3.0, 0.5, 0.1]
    got = weights_of(masked_weights, [math.log(r) for r in ratios], [0.0] * 5, floor=0.25, cap=2.0)
    torch.testing.assert_close(got.weights, torch.tensor([1.0, 1.5, 0.0, 0.5, 0.0]))
    assert got.cut.tolist() == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [1.5, 1.5, 1.0, 0.5, 0.5]),
        ("trajectory", [2.0, 2.0, 2.0, 0.25, 0.25]),  # 1.5 * 1.5 = 2.25, above the cap; 0.5 * 0.5; masked: not counted
        ("geometric", [1.5, 1.5, 1.5, 0.5, 0.5]),
    ],
)
def test_levels_by_hand(level, expected):
    logs = [math.log(1.5), math.log(1.5), 99.0, math.log(0.5), math.log(0.5)]
    options = {"mask": [1, 1, 0, 1, 1], "trajectories": [0, 0, 0, 1, 1], "level": level}
    got = weights_of(truncated_weights, logs, [0.0] * 5, **options)
    torch.testing.assert_close(got.weights, torch.tensor(expected))
    masked = weights_of(masked_weights, logs, [0.0] * 5, **options)
    expected = [0.0] * 3 + expected[3:] if level == "trajectory" else expected
    torch.testing.assert_close(masked.weights, torch.tensor(expected))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["token", "trajectory"])
@pytest.mark.parametrize("function", [truncated_weights, masked_weights])
def test_weights_are_trls(function, level, seed):
    """TRL's modes token_truncate, token_mask, sequence_truncate, sequence_mask, written down anew."""
    tokens = random_tokens(seed)
    difference = (tokens.old - tokens.engine) * tokens.mask
    if level == "trajectory":
        difference = difference.sum(-1, keepdim=True)
    ratio = torch.exp(difference)
    if function is truncated_weights:
        theirs = torch.clamp(ratio, max=1.4)
        options = {"cap": 1.4}
    else:
        theirs = ratio.masked_fill((ratio < 0.6) | (ratio > 1.4), 0.0)
        options = {"cap": 1.4, "floor": 0.6}
    packed = tokens.packed()
    ours = function(
        packed.old_logprobs, packed.engine_logprobs, packed.loss_mask, packed.trajectories, level=level, **options
    )
    assert ours.cut.any()
    torch.testing.assert_close(ours.weights, theirs.expand_as(tokens.mask)[tokens.mask], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_cap_is_respected_even_where_the_ratio_overflows(level):
    options = {"trajectories": [0, 1], "level": level, "cap": 3.0}
    assert weights_of(truncated_weights, [0.0, 0.0], [-1e4, -math.inf], **options).weights.tolist() == [3.0, 3.0]
    assert weights_of(masked_weights, [0.0, 0.0], [-1e4, -math.inf], **options).weights.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("level", LEVELS)
def test_garbage_at_masked_tokens_is_never_seen(level):
    got = weights_of(truncated_weights, [0.0, math.nan], [0.0, math.inf], mask=[1, 0], level=level)
    assert got.weights[0] == 1
    assert importance_weight_metrics(got, torch.tensor([1, 0])).weight_mean == 1


def test_metrics_count_loss_tokens_only_and_add_up():
    logs = [0.0, math.log(3), math.log(3)]
    first = weights_of(truncated_weights, logs, [0.0] * 3)
    second = weights_of(truncated_weights, [math.log(0.5), math.nan], [0.0, 0.0])
    total = importance_weight_metrics(first, torch.tensor([1, 1, 0])) + importance_weight_metrics(
        second, torch.tensor([True, False])
    )
    assert total.cut_fraction == pytest.approx(1 / 3)
    assert total.weight_mean == pytest.approx(3.5 / 3)
    assert total.weight_max.item() == 2


def test_bad_arguments_are_refused():
    one = torch.ones(2).long()
    with pytest.raises(ValueError, match=r"trainer_logprobs \[2, 1\], engine_logprobs \[2\]"):
        truncated_weights(torch.zeros(2, 1), torch.zeros(2), one, one)
    with pytest.raises(ValueError, match="cap must be above 0; it is 0"):
        masked_weights(torch.zeros(2), torch.zeros(2), one, one, cap=0)


def test_weights_undo_the_engine_mismatch_in_expectation():
    # The engine's expectation of weight * f is the trainer's expectation of f, while nothing is cut.
    generator = torch.Generator().manual_seed(0)
    trainer = torch.randn(6, generator=generator).log_softmax(0)
    engine = (trainer + 0.1 * torch.randn(6, generator=generator)).log_softmax(0)
    values = torch.randn(6, generator=generator)
    for function in (truncated_weights, masked_weights):
        weights = function(trainer, engine, torch.ones(6), torch.zeros(6).long()).weights
        torch.testing.assert_close((engine.exp() * weights * values).sum(), (trainer.exp() * values).sum())

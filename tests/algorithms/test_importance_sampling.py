from __future__ import annotations

import math

import pytest
import torch

from laminar.algorithms.importance_sampling import importance_weight_metrics, truncated_importance_weights


def test_weights_by_hand():
    trainer = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    engine = torch.tensor([-1.0, -1.0 - math.log(1.5), -4.0, -1.0 + math.log(2)])
    weights = truncated_importance_weights(trainer, engine)
    # The engine thought a token less probable than the trainer does: weighed up, to 2 at most.
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.5, 2.0, 0.5]))
    assert not weights.requires_grad


def test_cap_is_respected_even_where_the_ratio_overflows():
    weights = truncated_importance_weights(torch.tensor([0.0, 0.0]), torch.tensor([-1e4, -math.inf]), cap=3.0)
    assert weights.tolist() == [3.0, 3.0]


def test_metrics_count_loss_tokens_only_and_add_up():
    first = importance_weight_metrics(torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[1, 1, 0]]))
    second = importance_weight_metrics(torch.tensor([0.5, float("nan")]), torch.tensor([True, False]))
    total = first + second
    assert total.capped_fraction == pytest.approx(1 / 3)
    assert total.weight_mean == pytest.approx(3.5 / 3)
    assert total.weight_max.item() == 2


def test_capped_tokens_are_counted_for_a_cap_that_float32_cannot_hold():
    weights = truncated_importance_weights(torch.zeros(2), torch.tensor([-5.0, 0.0]), cap=1.7)
    assert importance_weight_metrics(weights, torch.ones(2), cap=1.7).capped_fraction == 0.5


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"trainer_logprobs \[2, 1\], engine_logprobs \[2\]"):
        truncated_importance_weights(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(ValueError, match="cap must be above 0; it is 0"):
        truncated_importance_weights(torch.zeros(1), torch.zeros(1), cap=0)


def test_weights_undo_the_engine_mismatch_in_expectation():
    # The engine's expectation of weight * f is the trainer's expectation of f, while nothing is capped.
    generator = torch.Generator().manual_seed(0)
    trainer = torch.randn(6, generator=generator).log_softmax(0)
    engine = (trainer + 0.1 * torch.randn(6, generator=generator)).log_softmax(0)
    values = torch.randn(6, generator=generator)
    weights = truncated_importance_weights(trainer, engine)
    torch.testing.assert_close((engine.exp() * weights * values).sum(), (trainer.exp() * values).sum())

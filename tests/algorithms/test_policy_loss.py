from __future__ import annotations

import functools
import math
import operator

import pytest
import torch

from laminar.algorithms.batching import pack_micro_batches
from laminar.algorithms.policy_loss import policy_loss


def loss_and_gradient(ratios, advantages, mask=None, normalizer=1.0, **options):
    """Packed tokens with old logprob -1 and the given ratios; the gradient is taken in the new logprobs."""
    old = torch.full((len(ratios),), -1.0)
    new = (old + torch.tensor(ratios).log()).requires_grad_()
    mask = torch.ones(len(ratios)) if mask is None else torch.tensor(mask)
    loss, metrics = policy_loss(new, old, torch.tensor(advantages), mask, normalizer=normalizer, **options)
    loss.backward()
    return loss.item(), new.grad.tolist(), metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "low", "high"),
    [
        # Positive advantage: gradient -ratio * A until the ratio passes 1.28, then none.
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.27, 2.0, -2.54, -2.54, 0, 0),
        (1.5, 2.0, -2.56, 0.0, 0, 1),
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # fallen below the lower bound: still pulled up
        # Negative advantage: gradient until the ratio passes 0.8 downwards, then none; never clipped from above.
        (1.0, -2.0, 2.0, 2.0, 0, 0),
        (0.81, -2.0, 1.62, 1.62, 0, 0),
        (0.5, -2.0, 1.6, 0.0, 1, 0),
        (1.5, -2.0, 3.0, 3.0, 0, 0),
        (1.5, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_clip_higher_by_hand(ratio, advantage, loss, gradient, low, high):
    got_loss, got_gradient, metrics = loss_and_gradient([ratio], [advantage])
    assert got_loss == pytest.approx(loss, rel=1e-6)
    assert got_gradient == pytest.approx([gradient], rel=1e-6)
    assert (metrics.clipped_low.item(), metrics.clipped_high.item()) == (low, high)


def test_sum_over_tokens_by_hand():
    # -(1.1 * 1 + 1.28 * 2 - 0.9 * 1) / 4; the token with ratio 3 is masked.
    loss, gradient, metrics = loss_and_gradient(
        [1.1, 1.5, 0.9, 3.0], [1.0, 2.0, -1.0, 5.0], mask=[1, 1, 1, 0], normalizer=4
    )
    assert loss == pytest.approx(-2.76 / 4, rel=1e-6)
    assert gradient == pytest.approx([-1.1 / 4, 0.0, 0.9 / 4, 0.0], rel=1e-6)
    assert metrics.tokens.item() == 3
    assert metrics.clip_fraction_high == pytest.approx(1 / 3)
    assert metrics.clip_fraction_low == 0
    assert metrics.ratio_mean == pytest.approx(3.5 / 3, rel=1e-6)
    assert metrics.ratio_max.item() == pytest.approx(1.5, rel=1e-6)


def test_importance_weights_scale_tokens_and_carry_no_gradient():
    weights = torch.tensor([2.0, 0.5], requires_grad=True)
    loss, gradient, _ = loss_and_gradient([1.0, 1.0], [1.0, 1.0], importance_weights=weights)
    assert loss == pytest.approx(-2.5)
    assert gradient == pytest.approx([-2.0, -0.5])
    assert weights.grad is None


def test_custom_clip_range():
    loss, gradient, metrics = loss_and_gradient([1.4, 0.6], [1.0, -1.0], clip_low=0.5, clip_high=0.5)
    assert loss == pytest.approx(-1.4 + 0.6, rel=1e-5)
    assert gradient == pytest.approx([-1.4, 0.6], rel=1e-5)
    assert metrics.clip_fraction_low == metrics.clip_fraction_high == 0


def test_garbage_at_masked_tokens_is_never_seen():
    nan = float("nan")
    new = torch.tensor([-1.0, nan, -math.inf], requires_grad=True)
    loss, metrics = policy_loss(
        new,
        torch.tensor([-1.0, -math.inf, nan]),
        torch.tensor([1.0, nan, nan]),
        torch.tensor([1, 0, 0]),
        importance_weights=torch.tensor([1.0, nan, math.inf]),
        normalizer=1,
    )
    loss.backward()
    assert loss.item() == -1
    assert new.grad.tolist() == [-1, 0, 0]
    assert metrics.ratio_mean == metrics.ratio_max.item() == 1


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_exploding_log_ratios_leave_finite_gradients(log_ratio, advantage):
    new = torch.tensor([log_ratio], requires_grad=True)
    loss, metrics = policy_loss(new, torch.zeros(1), torch.tensor([advantage]), torch.ones(1), normalizer=1)
    loss.backward()
    assert math.isfinite(loss.item()) and math.isfinite(new.grad.item()) and math.isfinite(metrics.ratio_mean)


def test_micro_batch_without_loss_tokens_has_a_zero_gradient():
    new = torch.randn(2, 3, requires_grad=True)
    loss, metrics = policy_loss(new, torch.zeros(2, 3), torch.ones(2), torch.zeros(2, 3), normalizer=5)
    loss.backward()
    assert loss.item() == 0 and not new.grad.any() and metrics.clip_fraction_low == 0


def test_bfloat16_logprobs_are_compared_in_float32():
    old = torch.tensor([-1.0])
    new = torch.tensor([-1.0], dtype=torch.bfloat16)
    loss, _ = policy_loss(new, old + 1e-3, torch.ones(1), torch.ones(1), normalizer=1)
    assert loss.item() == pytest.approx(-math.exp(-1e-3), rel=1e-6)


def random_batch(seed: int, rows: int = 12, longest: int = 9):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    mask = torch.arange(longest)[None] < lengths[:, None]
    old = -torch.rand(rows, longest, generator=generator, dtype=torch.float64)
    features = torch.randn(rows, longest, 5, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    weights = torch.rand(rows, longest, generator=generator, dtype=torch.float64) * 2
    return lengths.tolist(), mask, old, features, advantages, weights


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_give_the_gradient_and_metrics_of_the_whole_batch(seed):
    lengths, mask, old, features, advantages, weights = random_batch(seed)
    parameter = torch.nn.Parameter(torch.linspace(-0.4, 0.4, 5, dtype=torch.float64))
    normalizer = int(mask.sum())

    def loss_of(rows, columns):
        return policy_loss(
            old[rows, :columns] + features[rows, :columns] @ parameter,
            old[rows, :columns],
            advantages[rows],
            mask[rows, :columns],
            importance_weights=weights[rows, :columns],
            normalizer=normalizer,
        )

    whole_loss, whole_metrics = loss_of(list(range(len(lengths))), max(lengths))
    (whole_gradient,) = torch.autograd.grad(whole_loss, parameter)
    assert whole_metrics.clipped_low > 0 and whole_metrics.clipped_high > 0

    micro_batches = pack_micro_batches(lengths, 20)
    assert len(micro_batches) > 2
    losses, metrics = zip(*(loss_of(rows, max(lengths[row] for row in rows)) for rows in micro_batches), strict=True)
    for loss in losses:
        loss.backward()  # accumulates
    torch.testing.assert_close(parameter.grad, whole_gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(losses), whole_loss, rtol=1e-12, atol=1e-12)
    added = functools.reduce(operator.add, metrics)
    for name in ("tokens", "clipped_low", "clipped_high", "ratio_sum", "ratio_max"):
        torch.testing.assert_close(getattr(added, name), getattr(whole_metrics, name))


def test_packed_tokens_give_the_loss_of_padded_rows():
    _, mask, old, features, advantages, weights = random_batch(7)
    new = old + 0.3 * features[..., 0]
    padded, _ = policy_loss(new, old, advantages, mask, importance_weights=weights, normalizer=3)
    per_token = advantages[:, None].expand_as(old)
    packed, _ = policy_loss(
        new[mask], old[mask], per_token[mask], mask[mask], importance_weights=weights[mask], normalizer=3
    )
    torch.testing.assert_close(packed, padded)


@pytest.mark.parametrize("normalizer", [0, -1, float("nan")])
def test_normalizer_must_be_positive(normalizer):
    with pytest.raises(ValueError, match="number of loss tokens"):
        policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.ones(1), normalizer=normalizer)


def test_shapes_that_would_broadcast_are_refused():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"advantages \[2, 1\]"):
        policy_loss(ones, ones, torch.ones(2, 1), ones, normalizer=1)
    with pytest.raises(ValueError, match=r"advantages \[3\]"):
        policy_loss(ones, ones, torch.ones(3), ones, normalizer=1)
    with pytest.raises(ValueError, match=r"importance_weights \[2, 1\]"):
        policy_loss(ones, ones, torch.ones(2), ones, importance_weights=torch.ones(2, 1), normalizer=1)
    with pytest.raises(ValueError, match=r"advantages \[\]"):
        policy_loss(torch.ones(3), torch.ones(3), torch.tensor(1.0), torch.ones(3), normalizer=1)

from __future__ import annotations

import math

import pytest
import torch

from laminar.algorithms.value_loss import value_loss


def test_loss_and_gradient_by_hand():
    # Return 1 each. 0.5: not moved far; 0.9 from 0.5: bounded at 0.7, no gradient; 1.5 from 0.5: the true error is larger.
    values = torch.tensor([0.5, 0.9, 1.5, math.nan], requires_grad=True)
    old = torch.tensor([0.5, 0.5, 0.5, math.nan])
    losses, metrics = value_loss(values, old, torch.ones(4), torch.tensor([1, 1, 1, 0]), clip=0.2)
    assert losses.tolist() == pytest.approx([0.125, 0.045, 0.125, 0.0], rel=1e-6)
    losses.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.5, 0.0, 0.5, 0.0], rel=1e-6)
    assert metrics.clip_fraction == pytest.approx(1 / 3)
    assert metrics.value_mean == pytest.approx((0.5 + 0.9 + 1.5) / 3)
    assert metrics.explained_variance == 0  # there is none in the returns


def test_without_a_clip_it_is_half_the_squared_error():
    values = torch.tensor([2.0, -1.0], requires_grad=True)
    losses, metrics = value_loss(values, torch.zeros(2), torch.tensor([1.0, 1.0]), torch.ones(2), clip=None)
    losses.sum().backward()
    assert losses.tolist() == [0.5, 2.0]
    assert values.grad.tolist() == [1.0, -2.0]
    assert metrics.clip_fraction == 0


def test_explained_variance_by_hand_and_over_micro_batches():
    returns, values = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([0.5, 1.5, 2.5, 2.5])
    # Errors -0.5, -0.5, -0.5, 0.5: variance 3/16; returns: variance 5/4.
    parts = [value_loss(values[s], values[s], returns[s], torch.ones(2))[1] for s in (slice(0, 2), slice(2, 4))]
    assert (parts[0] + parts[1]).explained_variance == pytest.approx(1 - (3 / 16) / (5 / 4))


@pytest.mark.parametrize("seed", range(3))
def test_it_is_verls(seed):
    generator = torch.Generator().manual_seed(seed)
    old, returns = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64)
    values = (old + 0.3 * torch.randn(6, 9, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(6, 9, generator=generator) < 0.7
    clipped = torch.clamp(values, old - 0.2, old + 0.2)
    theirs = 0.5 * (torch.max((values - returns) ** 2, (clipped - returns) ** 2) * mask).sum() / mask.sum()
    losses, _ = value_loss(values[mask], old[mask], returns[mask], torch.ones(int(mask.sum())))
    torch.testing.assert_close(losses.mean(), theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(losses.mean(), values, retain_graph=True), torch.autograd.grad(theirs, values)
    )


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"returns \[1\]"):
        value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(1), torch.ones(2))

from __future__ import annotations

import math

import pytest
import torch

from laminar.algorithms.kl import mismatch_kl, reference_kl


def test_mismatch_by_hand():
    engine = torch.tensor([-1.0, -2.0, -3.0])
    trainer = torch.tensor([-1.0, -2.0 + math.log(2), 99.0])
    metrics = mismatch_kl(engine, trainer, torch.tensor([1, 1, 0]))
    assert metrics.tokens.item() == 2
    assert metrics.mismatch_kl_k1 == pytest.approx(-math.log(2) / 2, rel=1e-6)
    assert metrics.mismatch_kl == pytest.approx((2 - 1 - math.log(2)) / 2, rel=1e-6)
    assert metrics.difference_max.item() == pytest.approx(math.log(2), rel=1e-6)


def test_mismatch_estimates_the_divergence_of_engine_from_trainer():
    # Exact expectation under the engine's distribution: each token counted with its probability.
    generator = torch.Generator().manual_seed(1)
    engine, trainer = torch.randn(2, 8, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = (engine.exp() * (engine - trainer)).sum().item()
    per_token = [mismatch_kl(engine[i : i + 1], trainer[i : i + 1], torch.ones(1)) for i in range(8)]
    for name in ("mismatch_kl", "mismatch_kl_k1"):
        expected = sum(p * getattr(m, name) for p, m in zip(engine.exp().tolist(), per_token, strict=True))
        assert expected == pytest.approx(exact, rel=1e-9)


def test_small_mismatch_keeps_its_digits_and_is_never_negative():
    engine = torch.full((1000,), -2.0)
    for difference in (1e-5, 1e-6, 1e-7, -1e-6):
        trainer = engine + difference
        step = (trainer - engine)[0].item()
        assert mismatch_kl(engine, trainer, torch.ones(1000)).mismatch_kl == pytest.approx(step**2 / 2, rel=1e-4)
    generator = torch.Generator().manual_seed(2)
    for scale in (1e-8, 1e-4, 1.0, 30.0):
        noise = torch.randn(1000, generator=generator) * scale
        assert mismatch_kl(engine, engine + noise, torch.ones(1000)).k3_sum >= 0


def test_mismatch_stays_finite_and_adds_up():
    exploded = mismatch_kl(torch.tensor([-1e4, float("nan")]), torch.tensor([0.0, 0.0]), torch.tensor([1, 0]))
    assert math.isfinite(exploded.mismatch_kl)
    total = exploded + mismatch_kl(torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(1, 3))
    assert total.tokens.item() == 4
    assert total.difference_max.item() == 1e4
    assert total.mismatch_kl == pytest.approx(exploded.mismatch_kl / 4)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # With d = log p_ref - log p = log 3: value and its derivative in log p.
        ("k1", -math.log(3), 1.0),
        ("k2", math.log(3) ** 2 / 2, -math.log(3)),
        ("k3", 3 - 1 - math.log(3), 1 - 3.0),
    ],
)
def test_reference_kl_and_its_gradient_by_hand(estimator, value, gradient):
    logprobs = torch.tensor([-2.0, -2.0], requires_grad=True)
    reference = torch.tensor([-2.0 + math.log(3), float("nan")])
    losses, metrics = reference_kl(logprobs, reference, torch.tensor([1, 0]), estimator=estimator)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([value, 0.0], rel=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([gradient, 0.0], rel=1e-6)
    assert metrics.reference_kl == pytest.approx(value, rel=1e-6)


def test_small_reference_kl_keeps_its_digits_in_float32():
    logprobs = torch.tensor([-0.25])
    reference = logprobs + 1e-3
    step = (reference - logprobs).item()
    loss, _ = reference_kl(logprobs, reference, torch.ones(1))
    assert loss.item() == pytest.approx(step**2 / 2, rel=2e-3)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_expected_gradient_is_that_of_the_documented_divergence(estimator):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    # Expectation over tokens drawn from the policy: weigh each token's gradient by its (fixed) probability.
    probabilities = logprobs.detach().exp()
    losses = [
        probabilities[i]
        * reference_kl(logprobs[i : i + 1], reference[i : i + 1], torch.ones(1), estimator=estimator)[0].sum()
        for i in range(7)
    ]
    (expected,) = torch.autograd.grad(sum(losses), logits, retain_graph=True)
    if estimator == "k2":
        divergence = (logprobs.exp() * (logprobs - reference)).sum()  # KL(policy || reference)
    else:
        divergence = (reference.exp() * (reference - logprobs)).sum()  # KL(reference || policy)
    (exact,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(expected, exact)


def test_exploding_log_ratios_leave_finite_gradients():
    logprobs = torch.tensor([-1e4, 0.0], requires_grad=True)
    losses, _ = reference_kl(logprobs, torch.tensor([0.0, -1e4]), torch.ones(2))
    losses.sum().backward()
    assert losses.isfinite().all() and logprobs.grad.isfinite().all()


def test_bad_arguments_are_refused():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="'k4'"):
        reference_kl(one, one, torch.ones(1), estimator="k4")
    with pytest.raises(ValueError, match=r"engine_logprobs \[1, 1\]"):
        mismatch_kl(torch.zeros(1, 1), one, torch.ones(1))

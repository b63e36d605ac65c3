from __future__ import annotations

import math

import pytest
import torch

from laminar.algorithms import logprobs as logprobs_module
from laminar.algorithms.logprobs import token_entropy, token_logprobs


@pytest.fixture(params=[None, 7, 40], ids=["one chunk", "a row a chunk", "two rows a chunk"])
def chunk_elements(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS", request.param)


def random_logits(*shape, dtype=torch.float64, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    return logits.to(dtype), targets


def test_by_hand():
    logits = torch.tensor([[math.log(1), math.log(2), math.log(5)]])
    assert token_logprobs(logits, torch.tensor([1])).item() == pytest.approx(math.log(2 / 8), rel=1e-6)
    # Temperature 1/2 squares the odds: 4 / (1 + 4 + 25).
    assert token_logprobs(logits, torch.tensor([1]), 0.5).item() == pytest.approx(math.log(4 / 30), rel=1e-6)
    assert token_entropy(logits).item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_values_and_gradient_equal_the_plain_formula(temperature, chunk_elements):
    logits, targets = random_logits(2, 5, 17)
    logits.requires_grad_()
    upstream = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)

    plain = (logits / temperature).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    (plain_gradient,) = torch.autograd.grad((plain * upstream).sum(), logits)
    ours = token_logprobs(logits, targets, temperature)
    (our_gradient,) = torch.autograd.grad((ours * upstream).sum(), logits)

    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(our_gradient, plain_gradient)
    distribution = torch.distributions.Categorical(logits=logits.detach() / temperature)
    torch.testing.assert_close(token_entropy(logits, temperature), distribution.entropy())


def test_gradient_check():
    logits, targets = random_logits(3, 4)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, 0.7), logits.requires_grad_())


def test_bfloat16_logits_are_summed_in_float32():
    logits, targets = random_logits(4, 1000, dtype=torch.bfloat16, scale=1.0)
    logits.requires_grad_()
    ours = token_logprobs(logits, targets)
    assert ours.dtype == torch.float32
    exact = logits.detach().double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(ours.sum(), logits)
    assert gradient.dtype == torch.bfloat16
    assert token_entropy(logits).dtype == torch.float32


def test_packed_and_padded_agree_and_slices_of_logits_are_taken():
    logits, targets = random_logits(2, 6, 11, dtype=torch.float32)
    shifted = logits[:, :-1]  # not contiguous, as after the usual shift by one
    padded = token_logprobs(shifted, targets[:, 1:])
    torch.testing.assert_close(token_logprobs(shifted.reshape(-1, 11), targets[:, 1:].reshape(-1)), padded.reshape(-1))
    torch.testing.assert_close(token_logprobs(shifted, targets[:, 1:].int()), padded)


def test_vocabulary_entries_that_are_ruled_out():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logprob = token_logprobs(logits, torch.tensor([0]))
    logprob.sum().backward()
    assert logprob.item() == pytest.approx(math.log(0.5))
    assert logits.grad.tolist() == [[0.5, -0.5, 0.0]]
    assert token_entropy(logits).item() == pytest.approx(math.log(2))


def test_entropy_of_uniform_and_certain():
    assert token_entropy(torch.zeros(1, 8)).item() == pytest.approx(math.log(8))
    assert token_entropy(torch.tensor([[1e4, 0.0]])).item() == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_of_the_entropy(temperature, monkeypatch):
    monkeypatch.setattr("laminar.algorithms.logprobs.CHUNK_ELEMENTS", 22)  # two rows at once
    logits, _ = random_logits(7, 11)
    logits.requires_grad_()
    weights = torch.arange(7.0, dtype=logits.dtype)
    logprobs = torch.log_softmax(logits / temperature, -1)
    expected = torch.autograd.grad(-((logprobs.exp() * logprobs).sum(-1) * weights).sum(), logits)
    torch.testing.assert_close(
        torch.autograd.grad((token_entropy(logits, temperature) * weights).sum(), logits), expected
    )


def test_entropy_of_ruled_out_entries_has_a_finite_gradient():
    logits = torch.tensor([[1.0, 0.0, -math.inf]], requires_grad=True)
    token_entropy(logits).sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 2] == 0


def test_no_tokens():
    assert token_logprobs(torch.zeros(2, 0, 5), torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)


def test_backward_keeps_no_softmax():
    logits, targets = random_logits(3, 50, dtype=torch.float32)
    logits.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        token_logprobs(logits, targets, 0.5)
    others = [t for t in saved if t.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()]
    assert len(saved) == 3 and all(t.numel() == 3 for t in others)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_bad_arguments_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), temperature)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        token_entropy(torch.zeros(1, 2), temperature)
    with pytest.raises(ValueError, match="differ before the vocabulary"):
        token_logprobs(torch.zeros(3, 2), torch.zeros(2, dtype=torch.long))

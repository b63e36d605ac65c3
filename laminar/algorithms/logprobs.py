"""Logprobs and entropy of tokens under logits. Invariant: computed in float32 or wider, whatever the logits' type.

Vocabularies are large: a float32 copy of `[tokens, V]` logits is often the largest tensor of a training step. So rows
are handled in chunks, and the backward pass recomputes the softmax instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Elements of logits handled at once: 64 MiB in float32.
CHUNK_ELEMENTS = 2**24


def token_logprobs(
    logits: torch.Tensor,  # float [..., T, V]
    targets: torch.Tensor,  # int [..., T]: ids in [0, V), at masked positions too
    temperature: float = 1.0,
) -> torch.Tensor:  # float32 [..., T] (float64 for float64 logits)
    """Log-probability of every target under `softmax(logits / temperature)`, differentiable (once) in the logits.

    `logits[..., t, :]` must be those that predict `targets[..., t]`: the shift by one is the caller's. The temperature
    is the one that the tokens were sampled with, so that the result compares with the engine's.

    Raises ValueError for shapes that differ and for a temperature that is not above 0.
    """
    _check_temperature(temperature)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {list(logits.shape)} and targets {list(targets.shape)} differ before the vocabulary")
    rows = logits.reshape(-1, logits.shape[-1])
    flat: torch.Tensor = _TokenLogprobs.apply(rows, targets.reshape(-1).long(), temperature)  # type: ignore[no-untyped-call]
    return flat.view(targets.shape)


def token_entropy(
    logits: torch.Tensor,  # float [..., T, V]
    temperature: float = 1.0,
) -> torch.Tensor:  # float32 [..., T] (float64 for float64 logits)
    """Entropy in nats of `softmax(logits / temperature)` at every position, differentiable (once) in the logits.

    Raises ValueError for a temperature that is not above 0.
    """
    _check_temperature(temperature)
    rows = logits.reshape(-1, logits.shape[-1])
    flat: torch.Tensor = _TokenEntropy.apply(rows, temperature)  # type: ignore[no-untyped-call]
    return flat.view(logits.shape[:-1])


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits (which exist anyway) and one normalizer per row for the backward pass, and no softmax."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        normalizers = torch.empty(len(rows), dtype=_wide(rows), device=rows.device)
        for chunk in _chunks(rows):
            normalizers[chunk] = torch.logsumexp(rows[chunk].to(normalizers.dtype) / temperature, dim=-1)
        chosen = rows.gather(-1, targets[:, None])[:, 0].to(normalizers.dtype) / temperature
        ctx.save_for_backward(rows, targets, normalizers)
        ctx.temperature = temperature
        return chosen - normalizers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, targets, normalizers = ctx.saved_tensors
        scale = gradients[0].to(normalizers.dtype) / ctx.temperature  # [N]
        result = torch.empty_like(rows)
        for chunk in _chunks(rows):
            # d logprob / d logits = (one_hot(target) - softmax) / temperature
            scaled = rows[chunk].to(normalizers.dtype) / ctx.temperature
            softmax = scaled.sub_(normalizers[chunk, None]).exp_()
            gradient = softmax.mul_(-scale[chunk, None])
            gradient.scatter_add_(-1, targets[chunk, None], scale[chunk, None])
            result[chunk] = gradient.to(rows.dtype)
        return result, None, None


class _TokenEntropy(torch.autograd.Function):
    """Keeps the logits and the entropies for the backward pass, and no softmax."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, temperature: float) -> torch.Tensor:
        entropy = torch.empty(len(rows), dtype=_wide(rows), device=rows.device)
        for chunk in _chunks(rows):
            log_probabilities = torch.log_softmax(rows[chunk].to(entropy.dtype) / temperature, dim=-1)
            # entr(p) = -p log p, with 0 for p = 0, where p * log p would be 0 * -inf.
            entropy[chunk] = torch.special.entr(log_probabilities.exp()).sum(-1)
        ctx.save_for_backward(rows, entropy)
        ctx.temperature = temperature
        return entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows, entropy = ctx.saved_tensors
        scale = gradients[0].to(entropy.dtype) / ctx.temperature  # [N]
        result = torch.empty_like(rows)
        for chunk in _chunks(rows):
            # d entropy / d logits = -p * (log p + entropy) / temperature, in which p log p is -entr(p)
            log_probabilities = torch.log_softmax(rows[chunk].to(entropy.dtype) / ctx.temperature, dim=-1)
            probabilities = log_probabilities.exp_()
            gradient = torch.special.entr(probabilities).sub_(probabilities.mul_(entropy[chunk, None]))
            result[chunk] = gradient.mul_(scale[chunk, None]).to(rows.dtype)
        return result, None


def _chunks(rows: torch.Tensor) -> Iterator[slice]:
    """Slices of `rows` [N, V] of at most CHUNK_ELEMENTS elements, a row at least."""
    step = max(1, CHUNK_ELEMENTS // max(1, rows.shape[-1]))
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; it is {temperature} (score greedy tokens with 1.0)")

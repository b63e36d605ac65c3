"""Drawing one token per trajectory from a batch of logits.

Invariant: the logprob of a token is its logprob under the distribution that it was drawn from (temperature and top-p
applied), and the draw depends only on that distribution, the trajectory's key and the token's position: neither on the
rest of the batch nor on where the trajectory was generated before.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), element by element; uint64 [n] to uint64 [n]."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def key_of(seed: int) -> np.uint64:
    """The key of a trajectory with this seed (any integer; taken modulo 2**64)."""
    return np.uint64(mix(np.array([seed % 2**64], np.uint64) + _GOLDEN_RATIO)[0])


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1 - 2**-52] per trajectory, a pure function of its key and the position of the token.

    Args:
        keys: uint64 [n], from `key_of`.
        positions: int64 [n], index of the token to draw within prompt and response together.
    """
    bits = mix(keys + positions.astype(np.uint64) * _GOLDEN_RATIO)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def draw(
    logits: torch.Tensor,
    temperature: NDArray[np.float32],
    top_p: NDArray[np.float32],
    uniform: NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: float [n, vocabulary], as the model gives them.
        temperature: float32 [n]; 0 is greedy and leaves the logits unscaled.
        top_p: float32 [n]; ignored where the temperature is 0.
        uniform: float64 [n], from `uniforms`.

    Returns:
        tokens int64 [n] and their logprobs float32 [n], on the logits' device.
    """
    device, logits = logits.device, logits.float()
    sampled = temperature > 0
    greedy_tokens = None if sampled.all() else logits.argmax(-1)
    if sampled.any():
        scale = torch.from_numpy(np.where(sampled, temperature, np.float32(1))).to(device)
        logits = logits / scale[:, None]
        limits = np.where(sampled, top_p, np.float32(1))
        if (limits < 1).any():
            logits = _nucleus(logits, torch.from_numpy(limits).to(device))
    logprobs = logits.log_softmax(-1)
    if greedy_tokens is not None and not sampled.any():
        tokens = greedy_tokens
    else:
        # Inversion with float64 sums: one number per row instead of one per token of the vocabulary.
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        target = torch.from_numpy(uniform).to(device)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
        if greedy_tokens is not None:
            tokens = torch.where(torch.from_numpy(sampled).to(device), tokens, greedy_tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Logits with all but the smallest set of most likely tokens that reaches top_p (float32 [n]) at -inf."""
    ordered, order = logits.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    dropped = (before >= top_p[:, None]) & (top_p[:, None] < 1)
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), float("-inf"))

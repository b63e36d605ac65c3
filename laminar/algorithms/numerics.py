"""What the losses share: precision, the bound on log-ratios, and the checks of their arguments."""

from __future__ import annotations

import torch

# exp(20) is about 5e8: far beyond any clip range, yet no infinity (whose gradient would be 0 * inf = NaN).
LOG_RATIO_LIMIT = 20.0


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where it is float32 or float64, else a float32 copy (bfloat16 is too coarse for ratios)."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_shapes(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless all tensors have one shape (broadcasting [B] against [B, T] would hide mistakes)."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {list(t.shape)}" for name, t in tensors.items()))


def check_normalizer(normalizer: float) -> None:
    """Raise ValueError unless `normalizer` is above 0: a mini-batch without loss tokens has no step to make."""
    if not normalizer > 0:
        raise ValueError(f"normalizer must be the mini-batch's number of loss tokens, above 0; it is {normalizer}")

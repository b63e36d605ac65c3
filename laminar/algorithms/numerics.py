"""What the losses share: precision, the bound on log-ratios, sums per trajectory, and the checks of their arguments."""

from __future__ import annotations

import torch

# exp(20) is about 5e8: far beyond any clip range, yet no infinity (whose gradient would be 0 * inf = NaN).
LOG_RATIO_LIMIT = 20.0


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where it is float32 or float64, else a float32 copy (bfloat16 is too coarse for ratios)."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def sum_per_trajectory(
    values: torch.Tensor,  # float [N]
    mask: torch.Tensor,  # bool [N]
    trajectories: torch.Tensor,  # int64 [N]: the trajectory of each token, numbered from 0 (below N)
) -> torch.Tensor:  # float [N]
    """At each token the sum of its trajectory over the mask."""
    sums = torch.zeros_like(values).index_add(0, trajectories, torch.where(mask, values, 0.0))
    return sums[trajectories]


def mean_per_trajectory(
    values: torch.Tensor,  # float [N]
    mask: torch.Tensor,  # bool [N]
    trajectories: torch.Tensor,  # int64 [N]
) -> torch.Tensor:  # float [N]
    """At each token the mean of its trajectory over the mask; 0 where that is empty."""
    counts = sum_per_trajectory(mask.to(values.dtype), mask, trajectories)
    return sum_per_trajectory(values, mask, trajectories) / counts.clamp_min(1)


def check_shapes(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless all tensors have one shape (broadcasting [B] against [B, T] would hide mistakes)."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {list(t.shape)}" for name, t in tensors.items()))

from __future__ import annotations

from dataclasses import dataclass

import torch

from laminar.algorithms.token_metrics import TokenMetrics, masked_max, masked_sum


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Example(TokenMetrics):
    value_sum: torch.Tensor
    value_max: torch.Tensor


def example(values: list[float], mask: list[int]) -> Example:
    tensor, chosen = torch.tensor(values, dtype=torch.float32, requires_grad=True), torch.tensor(mask).bool()
    return Example(
        tokens=masked_sum(torch.ones_like(tensor), chosen),
        value_sum=masked_sum(tensor, chosen),
        value_max=masked_max(tensor, chosen),
    )


def floats(metrics: Example) -> tuple[float, float, float]:
    return metrics.tokens.item(), metrics.value_sum.item(), metrics.value_max.item()


def test_added_metrics_are_those_of_the_union():
    total = example([1, 5, float("nan")], [1, 1, 0]) + example([2, 9], [1, 0]) + example([], [])
    assert floats(total) == (3, 8, 5)
    assert isinstance(total, Example)


def test_metrics_carry_no_gradient_and_count_exactly():
    metrics = example([1.0], [1])
    assert not metrics.value_sum.requires_grad and metrics.value_sum.dtype == torch.float64


def test_reduced_over_ranks_sums_and_maximises():
    first, second = example([1, 5], [1, 1]), example([2], [1])

    def vector(metrics, names):
        return torch.stack([getattr(metrics, name) for name in names])

    total = first.reduced(
        lambda mine: mine + vector(second, ["tokens", "value_sum"]),
        lambda mine: torch.maximum(mine, vector(second, ["value_max"])),
    )
    assert floats(total) == (3, 8, 5)


def test_maximum_over_no_tokens_is_zero():
    assert floats(example([7], [0])) == (0, 0, 0)

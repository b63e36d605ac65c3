from __future__ import annotations

import numpy as np
import pytest
import torch

from laminar.algorithms.aggregation import token_weights
from tests.algorithms.random_tokens import LONGEST, ROWS, random_tokens


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [1 / 4, 0, 1 / 4]),  # 3 + 1 tokens
        ("trajectory", [1 / 6, 0, 1 / 2]),  # two trajectories that have any
        ("constant", [1 / 20, 0, 1 / 20]),
    ],
)
def test_weights_by_hand(aggregation, expected):
    weights = token_weights(np.array([3, 0, 1]), aggregation=aggregation, max_response_tokens=10)
    np.testing.assert_allclose(weights, expected, rtol=1e-12)


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant"])
def test_no_loss_tokens_weigh_nothing(aggregation):
    for loss_tokens in ([0, 0], []):
        weights = token_weights(np.array(loss_tokens, np.int64), aggregation=aggregation, max_response_tokens=10)
        np.testing.assert_array_equal(weights, [0.0] * len(loss_tokens))


@pytest.mark.parametrize("seed", range(3))
def test_weighted_sums_are_verls_agg_loss(seed):
    tokens = random_tokens(seed)
    losses = torch.randn(ROWS, LONGEST, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask, lengths = tokens.mask, tokens.mask.sum(-1)
    sums, present = (losses * mask).sum(-1), (lengths > 0).sum()
    theirs = {
        "token": sums.sum() / mask.sum(),  # token-mean
        "trajectory": (sums / (lengths + 1e-8)).sum() / present,  # seq-mean-token-mean
        "constant": sums.sum() / (present * LONGEST),  # seq-mean-token-sum-norm
    }
    for aggregation, expected in theirs.items():
        weights = token_weights(lengths.numpy(), aggregation=aggregation, max_response_tokens=LONGEST)
        assert (sums * torch.from_numpy(weights)).sum().item() == pytest.approx(expected.item(), abs=1e-6)

"""What a token weighs in the loss of its mini-batch. Numpy only.

Invariant: the weights are those of the whole mini-batch, over all its micro-batches and ranks. So the loss is a plain sum over
tokens, and cutting a mini-batch into micro-batches never changes its gradient.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["token", "trajectory", "constant"]


def token_weights(
    loss_tokens: NDArray[np.int64],  # int64 [B]: of each trajectory of the mini-batch
    *,
    aggregation: Aggregation,
    max_response_tokens: int,
) -> NDArray[np.float64]:  # float64 [B]
    """What each loss token of each trajectory weighs; 0 for a trajectory that has none, which counts nowhere.

    `token`: all tokens weigh the same, so long trajectories weigh more (DAPO, arXiv 2503.14476, section 3.3).
    `trajectory`: all trajectories weigh the same, whatever their length (GRPO, arXiv 2402.03300, equation 3).
    `constant`: a sum over tokens divided by a constant, trajectories times `max_response_tokens`: tokens weigh the same in
    every mini-batch, however long its trajectories are (Dr. GRPO, arXiv 2503.20783, section 3).
    """
    present = loss_tokens > 0
    weights = np.zeros(len(loss_tokens))
    if not present.any():
        return weights
    match aggregation:
        case "token":
            weights[present] = 1 / loss_tokens.sum()
        case "trajectory":
            weights[present] = 1 / (present.sum() * loss_tokens[present])
        case "constant":
            weights[present] = 1 / (present.sum() * max_response_tokens)
    return weights

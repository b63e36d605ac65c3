"""Overlong reward shaping: a soft penalty before the limit of length. Numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(
    response_lengths: NDArray[np.int64],  # int64 [B], tokens
    *,
    max_response_tokens: int,
    buffer_tokens: int,
    penalty: float = 1.0,
) -> NDArray[np.float64]:  # float64 [B], from -penalty to 0
    """What is added to the rewards: 0 up to `max_response_tokens - buffer_tokens`, from there linearly down to -penalty.

    Source: DAPO (arXiv 2503.14476) section 3.4, equation 13.
    """
    excess = response_lengths - (max_response_tokens - buffer_tokens)
    return -penalty * np.clip(excess / buffer_tokens, 0.0, 1.0)

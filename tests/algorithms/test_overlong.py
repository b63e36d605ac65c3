from __future__ import annotations

import numpy as np

from laminar.algorithms.overlong import overlong_penalty


def test_penalty_by_hand():
    # Limit 100, buffer 20: nothing up to 80, half of it at 90, all of it where a response was cut off.
    lengths = np.array([0, 1, 80, 85, 90, 99, 100, 130])
    penalties = overlong_penalty(lengths, max_response_tokens=100, buffer_tokens=20)
    np.testing.assert_allclose(penalties, [0, 0, 0, -0.25, -0.5, -0.95, -1, -1], atol=1e-12)
    halved = overlong_penalty(lengths, max_response_tokens=100, buffer_tokens=20, penalty=0.5)
    np.testing.assert_allclose(halved, penalties / 2)


def test_penalty_is_verls():
    # verl's DAPO reward manager: min(-exceed / buffer * factor, 0), on responses that are at most as long as the limit.
    lengths = np.arange(0, 65)
    exceed = lengths - (64 - 16)
    np.testing.assert_allclose(
        overlong_penalty(lengths, max_response_tokens=64, buffer_tokens=16, penalty=0.7),
        np.minimum(-exceed / 16 * 0.7, 0),
    )

from __future__ import annotations

import pytest

from laminar.errors import UserError
from laminar.rewards.length_penalty import LengthPenalty


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (15, 0.0), (16, 0.0), (17, -0.25), (19, -0.75), (20, -1.0), (500, -1.0)]
)
def test_nothing_then_a_slope_then_all(tokens: int, penalty: float) -> None:
    assert LengthPenalty(free=16, longest=20, key="k")(num_tokens=tokens) == penalty


@pytest.mark.parametrize(("free", "longest"), [(5, 5), (6, 5), (-1, 5)])
def test_bounds_without_a_slope(free: int, longest: int) -> None:
    with pytest.raises(UserError, match=r"reward\.params\.free_tokens: no room for a slope"):
        LengthPenalty(free=free, longest=longest, key="reward.params.free_tokens")

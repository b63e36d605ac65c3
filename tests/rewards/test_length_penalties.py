from __future__ import annotations

import pytest

from laminar.errors import UserError
from laminar.rewards.length_penalties import LinearPenalty


def dapo_equation_13(length: int, longest: int, buffer: int) -> float:
    if length <= longest - buffer:
        return 0.0
    return ((longest - buffer) - length) / buffer if length <= longest else -1.0


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 18, 19, 20, 21, 500])
def test_it_is_dapos_soft_overlong_punishment(length: int) -> None:
    penalty = LinearPenalty(free=16, longest=20, key="k")
    assert penalty(num_tokens=length) == pytest.approx(dapo_equation_13(length, 20, 4))


@pytest.mark.parametrize(("free", "longest"), [(5, 5), (6, 5), (-1, 5)])
def test_bounds_without_a_slope(free: int, longest: int) -> None:
    with pytest.raises(UserError, match=r"reward\.params\.free_tokens: no room for a slope"):
        LinearPenalty(free=free, longest=longest, key="reward.params.free_tokens")

from __future__ import annotations

from collections import Counter

from laminar.data.mixture import Mixture


def test_every_component_counts_up_without_gaps() -> None:
    mixture = Mixture([0.5, 0.3, 0.1, 3.0], seed=7)
    seen: dict[int, list[int]] = {}
    for position in range(2000):
        component, index = mixture.locate(position)
        seen.setdefault(component, []).append(index)
    assert all(indices == list(range(len(indices))) for indices in seen.values())


def test_shares_hold_after_any_number_of_positions() -> None:
    weights = [0.7, 0.2, 0.1]
    mixture = Mixture(weights, seed=1)
    counts = Counter[int]()
    for position in range(1000):
        counts[mixture.locate(position)[0]] += 1
        for component, weight in enumerate(weights):
            assert abs(counts[component] - weight * (position + 1)) < len(weights)
    assert counts == {0: 700, 1: 200, 2: 100}


def test_weights_are_relative_and_the_seed_moves_the_pattern() -> None:
    def pattern(weights: list[float], seed: int) -> list[int]:
        return [Mixture(weights, seed).locate(position)[0] for position in range(40)]

    assert pattern([8, 2], 3) == pattern([0.8, 0.2], 3)
    assert len({tuple(pattern([0.8, 0.2], seed)) for seed in range(20)}) > 1


def test_far_positions_are_as_exact_as_near_ones() -> None:
    mixture = Mixture([0.1, 0.9], seed=0)
    start = 10**15
    located = [mixture.locate(start + offset) for offset in range(100)]
    assert sum(component == 0 for component, _ in located) == 10
    for component in (0, 1):
        indices = [index for which, index in located if which == component]
        assert indices == list(range(indices[0], indices[0] + len(indices)))


def test_one_component_serves_everything() -> None:
    assert [Mixture([2.5], seed=0).locate(position) for position in (0, 1, 99)] == [(0, 0), (0, 1), (0, 99)]

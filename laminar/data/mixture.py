"""Which component of a weighted mixture serves which position.

Invariant: `Mixture.locate` is closed-form and pure, every component's own index counts 0, 1, 2, ... without gaps, and
after any number of positions a component of share p has served p of them to within the number of components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from laminar.data.source import derive_seed

PHASES = 1 << 20


class Mixture:
    """Spreads positions evenly over components, by weight; the seed decides where the pattern begins.

    The first component takes the positions at which floor(position * share + phase) steps up; the others split what is
    left in the same way. Shares are exact fractions, so no position is lost to rounding however far the data goes.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Weights are relative and greater than 0."""
        exact = [Fraction(repr(weight)) for weight in weights]
        self._shares: list[Fraction] = []  # of what the components before have left
        self._phases: list[Fraction] = []
        for component in range(len(exact)):
            self._shares.append(exact[component] / sum(exact[component:]))
            self._phases.append(Fraction(derive_seed(seed, "mixture", component) % PHASES, PHASES))

    def locate(self, position: int) -> tuple[int, int]:
        """(component, index within the component) of a position counted from 0."""
        rest = position
        last = len(self._shares) - 1
        for component in range(last):
            share, phase = self._shares[component], self._phases[component]
            served = math.floor(rest * share + phase)  # before this position
            if math.floor((rest + 1) * share + phase) > served:
                return component, served
            rest -= served
        return last, rest

"""How long something was in each of its states: the source of every idle fraction."""

from __future__ import annotations

from collections.abc import Callable


class StateClock:
    """Adds up seconds per state; `now` is the loop's clock, so it works in virtual time too."""

    def __init__(self, state: str, now: Callable[[], float]) -> None:
        self._now = now
        self._since = now()
        self._totals: dict[str, float] = {}
        self.state = state

    def enter(self, state: str) -> None:
        """The state from now on."""
        if state != self.state:
            self._add_up()
            self.state = state

    def totals(self) -> dict[str, float]:
        """Seconds per state until now."""
        self._add_up()
        return dict(self._totals)

    def _add_up(self) -> None:
        now = self._now()
        self._totals[self.state] = self._totals.get(self.state, 0.0) + now - self._since
        self._since = now


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Seconds per state between two `totals()`."""
    return {state: seconds - before.get(state, 0.0) for state, seconds in after.items()}

"""A level over time as a bounded number of bins, for runs whose length is not known beforehand.

Invariant: the sum of all bins is the integral of the level; when the bins run out, neighbours are merged.
"""

from __future__ import annotations

MAX_BINS = 240  # even: neighbours are merged in pairs


class BinnedMean:
    """Mean of a piecewise constant level in bins of equal width; a change within a bin costs a few additions."""

    def __init__(self, start: float) -> None:
        """The level is 0 from `start` (seconds) on."""
        self.width = 1.0  # seconds
        self._start = self._last = self._taken_at = start
        self._level = 0.0
        self._full: list[float] = []  # level times seconds of the bins before the current one
        self._current = 0.0  # of the current bin, so far
        self._current_end = start + self.width
        self._total = self._taken = 0.0

    def change(self, now: float, by: float) -> None:
        """The level changes now."""
        if now > self._current_end:
            self._advance(now)
        else:
            self._current += self._level * (now - self._last)
            self._last = now
        self._level += by

    def take(self, now: float) -> tuple[float, float]:
        """Integral of the level, and seconds, since the last call."""
        self.change(now, 0.0)
        total, seconds = self._total + self._current, now - self._taken_at
        taken = total - self._taken
        self._taken, self._taken_at = total, now
        return taken, seconds

    def means(self) -> list[float]:
        """Mean level of each bin until the last change; the last bin counts the seconds that it has."""
        means = [integral / self.width for integral in self._full]
        seconds = self._last - (self._current_end - self.width)
        if seconds > 0:
            means.append(self._current / seconds)
        return [round(mean, 4) for mean in means]

    def _advance(self, now: float) -> None:
        while now > self._current_end:
            self._current += self._level * (self._current_end - self._last)
            self._last = self._current_end
            self._full.append(self._current)
            self._total += self._current
            self._current = 0.0
            if len(self._full) == MAX_BINS:
                self._full = [sum(self._full[k : k + 2]) for k in range(0, MAX_BINS, 2)]
                self.width *= 2
            self._current_end = self._start + self.width * (len(self._full) + 1)
        self._current += self._level * (now - self._last)
        self._last = now

"""Whether the trainer waits for stragglers: it could train, but `max_staleness` says which groups it has to train first.

Then the run is as fast as its longest trajectory. What slows that one slows all; and an emptied rollout has nothing to add,
for there are groups enough. Where the trainer waits because groups are too few, more rollouts at work help. Pure: no clock.
"""

from __future__ import annotations

from collections import deque

STEPS = 3  # newest steps that count


class StragglerWait:
    """Follows the trainer, and how many groups are ready."""

    def __init__(self, groups_per_step: int, now: float) -> None:
        self._enough = groups_per_step
        self._enough_since: float | None = None  # a step's groups have been ready
        self._free_since = self._last_start = now
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)  # (seconds waited for stragglers, seconds in all)

    @property
    def share(self) -> float:
        """Of the time of the newest steps, 0 to 1."""
        total = sum(seconds for _, seconds in self._steps)
        return sum(waited for waited, _ in self._steps) / total if total > 0 else 0.0

    def ready(self, groups: int, now: float) -> None:
        """So many groups are ready now."""
        if groups < self._enough:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now

    def step_started(self, groups_left: int, now: float) -> None:
        """The trainer was given a step's groups; so many ready ones are left."""
        waited = 0.0 if self._enough_since is None else max(0.0, now - max(self._enough_since, self._free_since))
        self._steps.append((waited, now - self._last_start))
        self._last_start = now
        self._enough_since = None
        self.ready(groups_left, now)

    def step_finished(self, now: float) -> None:
        """The trainer is free for another."""
        self._free_since = now

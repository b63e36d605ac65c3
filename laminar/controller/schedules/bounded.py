"""The bound on staleness that all schedules share: admission before, and what to leave out after a loss of steps.

With B groups a step, the bound S and the published version c, version v has S + 1 - (c - v) steps of B left that can train it;
a group may start at v only while all that is outstanding fits into these. Then the groups of version w or older never
outnumber the places that are left for them; `select` of each schedule keeps it so. `docs/schedules.md` has the proof.
"""

from __future__ import annotations

from collections.abc import Sequence


class BoundedSchedule:
    """Base of all schedules: everything of `Schedule` but `select`."""

    parts = 1
    interrupts = False
    synchronizes = False

    def __init__(self, *, groups_per_step: int, max_staleness: int | None, outstanding_batches: float = 2.0) -> None:
        """
        Args:
            max_staleness: in versions; None for no bound.
            outstanding_batches: without a bound, groups that are in progress or wait for the trainer at most, in steps.
        """
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._most_outstanding = int(groups_per_step * outstanding_batches)

    @property
    def batch_groups(self) -> int:
        """Groups per part."""
        return self._groups_per_step // self.parts

    def room(
        self, *, serving_version: int, published_version: int, outstanding: int, taken: int, steps_left: int
    ) -> int:
        """Groups that may start now; never more than the steps that are left need."""
        needed = steps_left * self._groups_per_step - taken - outstanding
        if self._max_staleness is None:
            return max(0, min(needed, self._most_outstanding - outstanding))
        return max(0, min(needed, self._places(serving_version, published_version) - taken - outstanding))

    def stale(self, outstanding: Sequence[tuple[int, int, bool]], *, published_version: int) -> list[int]:
        """The fewest groups to drop: oldest versions first, of one version those that are not ready first."""
        if self._max_staleness is None:
            return []
        oldest_first = sorted((version, is_ready, group_id) for group_id, version, is_ready in outstanding)
        excess = 0
        for count, (version, _, _) in enumerate(oldest_first, start=1):
            # Right at the last group of each version, too low before it.
            excess = max(excess, count - self._places(version, published_version))
        return [group_id for _, _, group_id in oldest_first[:excess]]

    def _places(self, version: int, published_version: int) -> int:
        """Groups of this version or older that steps from the published version on can train within the bound."""
        assert self._max_staleness is not None
        return max(0, version + self._max_staleness + 1 - published_version) * self._groups_per_step

"""The bound on staleness that all schedules share: admission before, and what to leave out after a loss of steps.

With B groups a step, the bound S, the published version c and L lost versions, a group may start at version v only if
fewer than (v - L + S + 1) * B groups have been admitted. Then the groups of version w or older never outnumber the
places that are left for them, S + 1 - (c - w) steps of B; `select` of each schedule keeps it so. `docs/schedules.md` has
the proof.
"""

from __future__ import annotations

from collections.abc import Sequence


class BoundedSchedule:
    """Base of all schedules: everything of `Schedule` but `select`."""

    parts = 1
    interrupts = False
    synchronizes = False

    def __init__(
        self, *, groups_per_step: int, max_staleness: int | None, steps: int, outstanding_batches: float = 2.0
    ) -> None:
        """
        Args:
            max_staleness: in versions; None for no bound.
            outstanding_batches: without a bound, groups that are in progress or wait for the trainer at most, in steps.
        """
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._total = groups_per_step * steps
        self._most_outstanding = int(groups_per_step * outstanding_batches)

    @property
    def batch_groups(self) -> int:
        """Groups per part."""
        return self._groups_per_step // self.parts

    def room(self, *, serving_version: int, admitted: int, outstanding: int, lost_steps: int) -> int:
        """Groups that may start now; never more than all steps together need."""
        if self._max_staleness is None:
            return max(0, min(self._total - admitted, self._most_outstanding - outstanding))
        steps = serving_version - lost_steps + self._max_staleness + 1
        return max(0, min(steps * self._groups_per_step, self._total) - admitted)

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

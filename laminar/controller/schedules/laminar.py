"""Trajectory-level asynchrony: the trainer takes whatever is complete, in the order that the buffer's strategy prefers.

Invariant: after a step has taken its groups, of version v or older no more stay behind than later steps can still train
within the bound. So some picks are obligations: a preferred group is passed over where taking it would leave too few
places for them, and a step waits only for the groups whose deadline it is. After a loss of steps more may be overdue than
one step can take; then it is the oldest groups, a whole step of them, and never a wait for more than these.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from laminar.controller.buffer_strategies import BufferStrategy
from laminar.controller.schedules.bounded import BoundedSchedule
from laminar.controller.schedules.schedule import ReadyGroup


class LaminarSchedule(BoundedSchedule):
    """See the module's text; implements `Schedule`."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int | None,
        strategy: BufferStrategy,
        outstanding_batches: float = 2.0,
    ) -> None:
        """`max_staleness`: in versions; None for no bound, so no obligations."""
        super().__init__(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            outstanding_batches=outstanding_batches,
        )
        self._strategy = strategy

    def select(
        self,
        ready: Sequence[ReadyGroup],
        outstanding: Mapping[int, int],
        *,
        published_version: int,
        part: int,
        no_more_groups: bool,
    ) -> list[int] | None:
        """The groups that the strategy prefers, as far as the obligations leave places; None until those are ready.

        O(n log n) in the number of outstanding groups, plus the strategy's own time.
        """
        size = self._groups_per_step
        if len(ready) < size:
            if no_more_groups and len(ready) == len(outstanding) > 0:
                return sorted(group.group_id for group in ready)
            return None
        obligations = self._obligations(outstanding, published_version)
        if not _met(obligations, Counter(group.policy_version for group in ready)):
            return None
        # Places for groups newer than each obligation. Only a group that is taken costs time for each of them, and there
        # are few: at most outstanding / B + 1, and one more per lost version.
        places = [(version, size - needed) for version, needed in obligations]
        newest = _newest_allowed(places)
        chosen: list[int] = []
        for group in self._strategy.rank(ready, published_version=published_version):
            version = group.policy_version
            if newest is not None and version > newest:
                continue
            chosen.append(group.group_id)
            if len(chosen) == size:
                break
            if places and version > places[0][0]:
                places = [(old, left - 1 if version > old else left) for old, left in places]
                newest = _newest_allowed(places)
        return chosen

    def _obligations(self, outstanding: Mapping[int, int], published_version: int) -> list[tuple[int, int]]:
        """(version, how many of this version or older must be taken now), ascending, where there are any."""
        if self._max_staleness is None:
            return []
        counts = Counter(outstanding.values())
        obligations = []
        until = 0
        for version in sorted(counts):
            until += counts[version]
            needed = until - self._places(version, published_version + 1)
            if needed > 0:
                obligations.append((version, min(needed, self._groups_per_step)))
        return obligations


def _met(obligations: Sequence[tuple[int, int]], ready: Mapping[int, int]) -> bool:
    """Whether enough groups are ready for every obligation; `ready` counts them by version."""
    versions = deque(sorted(ready))
    until = 0
    for version, needed in obligations:
        while versions and versions[0] <= version:
            until += ready[versions.popleft()]
        if until < needed:
            return False
    return True


def _newest_allowed(places: Sequence[tuple[int, int]]) -> int | None:
    """The newest version that may still be taken; None where any may."""
    return next((version for version, left in places if left == 0), None)

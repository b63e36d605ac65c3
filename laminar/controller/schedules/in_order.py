"""Batches in the order of admission, strictly one after the other, and weights for all rollouts together.

Invariant: a step trains the B groups that are the oldest outstanding (by version, then by admission), whatever else is
ready. A group that is dropped makes room for the next in order, so no batch waits for a group that will not come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from laminar.controller.schedules.bounded import BoundedSchedule
from laminar.controller.schedules.schedule import ReadyGroup


class InOrderSchedule(BoundedSchedule):
    """Base of `synchronous`, `one_step` and `stream`; the buffer's strategy has no say."""

    synchronizes = True

    def select(
        self,
        ready: Sequence[ReadyGroup],
        outstanding: Mapping[int, int],
        *,
        published_version: int,
        part: int,
        no_more_groups: bool,
    ) -> list[int] | None:
        """Of the step's groups that no part has taken yet, those that completed first; None until enough have.

        With one part these are all of the step's groups.
        """
        if not outstanding or len(ready) < min(self.batch_groups, len(outstanding)):
            return None
        # By version first: rollouts whose relays lag behind may start older versions later. Almost sorted as it comes.
        oldest_first = sorted((version, group_id) for group_id, version in outstanding.items())
        current = oldest_first[: self._groups_per_step - part * self.batch_groups]
        by_id = {group.group_id: group for group in ready}
        candidates = [by_id[group_id] for _, group_id in current if group_id in by_id]
        if len(candidates) < self.batch_groups and not (no_more_groups and len(candidates) == len(outstanding)):
            return None
        candidates.sort(key=lambda group: group.completed)
        return sorted(group.group_id for group in candidates[: self.batch_groups])

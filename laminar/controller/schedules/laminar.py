"""Trajectory-level asynchrony with a strict bound on staleness, kept by admission alone.

With B groups a step and bound S, a group may start at version v only if fewer than (v + S + 1) * B groups have been
admitted. When step c + 1 is put together (the trainer is at version c), the oldest groups go first, and the step waits
unless afterwards, for every version v, at most (v + S - c) * B groups of version v or older stay behind: so many can
still be trained before their staleness would exceed S.

Why a batch always exists once everything has finished: c * B groups have been trained, so at most (v + S + 1 - c) * B
groups of version v or older are outstanding (by admission if v started during this step, else by the condition that the
step before kept), and taking the B oldest leaves at most (v + S - c) * B. Nothing is thrown away, long trajectories
included; only the step whose deadline it is waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from laminar.controller.schedules.schedule import ReadyGroup


class LaminarSchedule:
    """See the module's text; implements `Schedule`."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, steps: int) -> None:
        self._batch = groups_per_step
        self._max_staleness = max_staleness
        self._total = groups_per_step * steps

    def may_admit(self, *, serving_version: int, admitted: int) -> bool:
        """Whether one more group may start; never more than all steps together need."""
        return admitted < min((serving_version + self._max_staleness + 1) * self._batch, self._total)

    def select(
        self,
        ready: Sequence[ReadyGroup],
        outstanding: Mapping[int, int],
        *,
        published_version: int,
        no_more_groups: bool,
    ) -> list[int] | None:
        """The oldest ready groups, if the bound can still be kept for all that stay behind."""
        oldest_first = sorted(ready, key=lambda group: (group.policy_version, group.group_id))
        chosen = oldest_first[: self._batch]
        if len(chosen) < self._batch and not (no_more_groups and len(ready) == sum(outstanding.values()) > 0):
            return None
        left = dict(outstanding)
        for group in chosen:
            left[group.policy_version] -= 1
        behind = 0
        for version in sorted(left):
            behind += left[version]
            if behind > max(0, version + self._max_staleness - published_version) * self._batch:
                return None
        return [group.group_id for group in chosen]

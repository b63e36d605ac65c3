"""What the controller asks of a schedule. A schedule has no tasks, no clock and no channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(kw_only=True, slots=True, frozen=True)
class ReadyGroup:
    """A scored group that waits in the experience buffer."""

    group_id: int  # grows in the order of admission
    policy_version: int


class Schedule(Protocol):
    """Decides which groups may start and which are trained next."""

    def may_admit(self, *, serving_version: int, admitted: int) -> bool:
        """Whether one more group may start on a rollout that serves this version.

        Args:
            serving_version: policy version that would generate the group.
            admitted: groups admitted so far, less those that were dropped.
        """
        ...

    def select(
        self,
        ready: Sequence[ReadyGroup],
        outstanding: Mapping[int, int],
        *,
        published_version: int,
        no_more_groups: bool,
    ) -> list[int] | None:
        """Group ids of the next step's batch; None to wait.

        Args:
            ready: groups in the buffer.
            outstanding: per policy version, groups admitted and not yet trained or dropped (the ready ones included).
            published_version: the trainer's own version, that is staleness 0.
            no_more_groups: the data has ended: what is outstanding is all that will ever come.
        """
        ...

"""What the controller asks of a schedule. A schedule has no tasks, no clock, no channel, and no memory between calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(kw_only=True, slots=True, frozen=True)
class ReadyGroup:
    """A scored group that waits in the experience buffer."""

    group_id: int  # grows in the order of admission
    policy_version: int  # oldest among its members; may grow when a member is generated anew, never fall
    completed: int  # grows in the order of completion


class Schedule(Protocol):
    """Decides which groups may start and which are trained next."""

    @property
    def parts(self) -> int:
        """Batches that one step is selected in, one after the other: 1; the mini-batches under `stream`."""
        ...

    @property
    def batch_groups(self) -> int:
        """Groups per part."""
        ...

    @property
    def interrupts(self) -> bool:
        """Rollouts stop their trajectories to take newer weights and go on with them: `partial`."""
        ...

    @property
    def synchronizes(self) -> bool:
        """Rollouts take new weights together: none before all of them have drained."""
        ...

    def room(
        self, *, serving_version: int, published_version: int, outstanding: int, taken: int, steps_left: int
    ) -> int:
        """How many groups may start now on rollouts that serve this version.

        Args:
            serving_version: policy version that would generate them.
            published_version: the trainer's own version, that is staleness 0.
            outstanding: groups admitted and not yet taken for training or dropped.
            taken: groups that the step in the making has taken.
            steps_left: steps of the run that are not made yet, that one included.
        """
        ...

    def select(
        self,
        ready: Sequence[ReadyGroup],
        outstanding: Mapping[int, int],
        *,
        published_version: int,
        part: int,
        no_more_groups: bool,
    ) -> list[int] | None:
        """Group ids of the next part of the next step's batch; None to wait.

        Args:
            ready: groups in the buffer.
            outstanding: group id -> policy version of every group that is admitted and not yet taken for training or
                dropped, the ready ones included.
            published_version: the trainer's own version, that is staleness 0.
            part: which part of the step, from 0; the groups of the parts before it are no longer outstanding.
            no_more_groups: the data has ended: what is outstanding is all that will ever come. Then a part may be
                short; with nothing outstanding there is none (None), and the step ends with the parts that it has.
        """
        ...

    def stale(self, outstanding: Sequence[tuple[int, int, bool]], *, published_version: int) -> list[int]:
        """Ids of the fewest groups to drop so that all others can be trained within the bound from this version on.

        There are some only after the trainer has lost steps. Ask when the groups of the lost steps are back and the
        restarted trainer has published; where stale groups are to be trained, do not ask: `select` goes on.

        Args:
            outstanding: (group id, policy version, whether it is ready) of every outstanding group.
            published_version: the trainer's version after the restart.
        """
        ...

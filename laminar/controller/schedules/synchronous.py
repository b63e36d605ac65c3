"""The classical loop: generate a batch, train on it, give the new weights to all rollouts, repeat.

Invariant: every group is trained at staleness 0.
"""

from __future__ import annotations

from laminar.controller.schedules.in_order import InOrderSchedule


class SynchronousSchedule(InOrderSchedule):
    """Implements `Schedule`: in order, nothing in advance."""

    def __init__(self, *, groups_per_step: int) -> None:
        """Its bound is 0."""
        super().__init__(groups_per_step=groups_per_step, max_staleness=0)

"""Stream generation: as the k-step pipeline, but a batch reaches the trainer in parts, what completed first in the first.

Invariant: each part is taken from the current batch alone, so the last part waits for the batch's longest trajectory.
"""

from __future__ import annotations

from laminar.controller.schedules.in_order import InOrderSchedule


class StreamSchedule(InOrderSchedule):
    """Implements `Schedule`: in order, k = `max_staleness` batches in advance, a step in `parts` mini-batches."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, parts: int) -> None:
        """`parts` divides `groups_per_step`."""
        super().__init__(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self.parts = parts

"""The k-step pipeline: train on batch n - k while batch n is generated; k is `max_staleness`, usually 1.

Invariant: the batches are those of `InOrderSchedule`; at most k of them are generated in advance.
"""

from __future__ import annotations

from laminar.controller.schedules.in_order import InOrderSchedule


class OneStepSchedule(InOrderSchedule):
    """Implements `Schedule`: in order, k = `max_staleness` batches in advance."""

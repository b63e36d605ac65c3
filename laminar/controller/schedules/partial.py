"""Partial rollouts, as in AReaL: every new version interrupts all trajectories, which go on with it.

Invariant: the same as under `laminar`, with a group's version that of its trajectories' first tokens. So one trajectory
mixes versions, and each interruption costs a prefill of what it had.
"""

from __future__ import annotations

from laminar.controller.schedules.laminar import LaminarSchedule


class PartialSchedule(LaminarSchedule):
    """Implements `Schedule`: admission and batches are those of `laminar`."""

    interrupts = True

"""Exported KV goes with its own trajectory, to a rollout of its version, under a newer lease; and is forgotten with it.

Assignments from the messages alone; that none is kept for a trajectory that has ended by a recount of the controller's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.protocol.messages import Generate, TrajectoryAssignment
from laminar.simulation.faults.invariants.invariant import Invariant


class ExportedKvGoesWithItsTrajectory(Invariant):
    """See the module's text."""

    name = "exported KV goes with its trajectory"

    def message_handlers(self) -> dict[type, Callable[[str, bool, Any], None]]:
        """See `Invariant`."""
        return {Generate: self._on_generate}

    def _on_generate(self, peer: str, to_worker: bool, message: Generate) -> None:
        for assignment in message.assignments:
            if assignment.kv is not None and not _fits(assignment):
                self.fail(f"{peer} is given trajectory {assignment.trajectory_id} with {assignment.kv}")

    def recount(self) -> None:
        """See `Invariant`."""
        for reference in self.controller.rollouts.kv_exports:
            if self.controller.pool.get(reference.trajectory_id) is None:
                self.fail(f"{reference.name} is kept, and its trajectory is not in progress any more")


def _fits(assignment: TrajectoryAssignment) -> bool:
    reference = assignment.kv
    assert reference is not None
    return (
        reference.trajectory_id == assignment.trajectory_id
        and reference.lease < assignment.lease
        and reference.policy_version == assignment.policy_version
        and reference.tokens <= len(assignment.prompt_token_ids) + len(assignment.token_ids)
    )

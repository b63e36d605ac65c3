"""Work goes only to rollouts that are heard, serve weights, and are to stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.controller.fleet_health import Health
from laminar.observability.events import TrajectoryMoved, TrajectoryStarted
from laminar.simulation.faults.invariants.invariant import Invariant


class OnlyTheHealthyWork(Invariant):
    """See the module's text."""

    name = "only healthy rollouts are given work"

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """See `Invariant`."""
        return {TrajectoryStarted: self._on_given, TrajectoryMoved: self._on_given}

    def _on_given(self, event: TrajectoryStarted | TrajectoryMoved) -> None:
        rollout = event.trajectory.rollout or ""
        health = self.controller.fleet.health.health(rollout)
        if health is not Health.HEALTHY:
            self.fail(f"trajectory {event.trajectory.trajectory_id} is given to {rollout}, which is {health.value}")

    def recount(self) -> None:
        """See `Invariant`: who is there is one of those that are there by the state machine, and the other way round."""
        fleet = self.controller.fleet
        for name in fleet.replicas:
            if fleet.health.health(name) not in (Health.STARTING, Health.HEALTHY, Health.SUSPECT, Health.DRAINING):
                self.fail(f"{name} is there, and {fleet.health.health(name).value}")
        for name, member in fleet.health.members.items():
            if member.health in (Health.HEALTHY, Health.SUSPECT, Health.DRAINING) and name not in fleet.replicas:
                self.fail(f"{name} is {member.health.value}, and not there")

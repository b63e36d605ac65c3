"""The rollouts of the run: who is there, who is brought back, who is left out.

Invariants: a rollout gets a driver when it is ready and loses it when it is lost; its trajectories become orphans in the same
moment. A lost rollout is started anew as often as `rollout.restarts` allows; the run ends only when none is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.relay import Relay
from laminar.controller.relay_manager import RelayManager
from laminar.controller.replica import Replica
from laminar.controller.state_clock import StateClock
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import EventBus, Notice, RolloutLost, TrajectoryOrphaned, WorkerReplaced
from laminar.trajectory import Trajectory

Restart = Callable[[str, str], Awaitable[None]]
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
Live = Callable[[Replica], Coroutine[Any, Any, None]]


class RolloutFleet:
    """Replicas by name, relay and version, and what happens when they come and go."""

    def __init__(
        self,
        registry: WorkerRegistry,
        events: EventBus,
        relays: RelayManager,
        pool: PartialResponsePool,
        config: ExperimentConfig,
        *,
        restart: Restart,
    ) -> None:
        """`restart(name, reason)` starts a lost rollout anew, or raises WorkerLost if it cannot."""
        self.replicas: dict[str, Replica] = {}
        self.serving: Counter[int] = Counter()  # rollouts by version
        self.relay_of: dict[str, Relay] = {}  # rollouts of the run, those included that are being brought back
        self._registry = registry
        self._events = events
        self._relays = relays
        self._pool = pool
        self._restart = restart
        self._restarts_left = dict.fromkeys(range(config.rollout.replicas), config.rollout.restarts)
        self._start_limit_s = config.controller.start_timeout_s
        self._restarting: dict[str, int] = {}  # by name: number of the restart that is under way
        self._restart_number = 0
        self._by_relay: dict[int, dict[str, Replica]] = {}  # rollouts that are there
        self._spawn: Spawn | None = None
        self._lives: Sequence[Live] = ()
        self._now = asyncio.get_running_loop().time
        registry.on_lost("rollout", self._on_lost)
        registry.on_ready("rollout", self._on_ready)

    def start(self, spawn: Spawn, lives: Sequence[Live]) -> None:
        """Take all ready rollouts in, now and later.

        Args:
            spawn: makes tasks that belong to the run.
            lives: coroutines that run for each rollout until it is lost: its driver, its polls.
        """
        self._spawn, self._lives = spawn, lives
        for name in self._registry.names("rollout"):
            self._on_ready(self._registry.workers[name])

    def pulled(self, replica: Replica, version: int) -> None:
        """A rollout serves this version now."""
        self.serving[replica.policy_version] -= 1
        replica.policy_version = version
        self.serving[version] += 1

    def all_serve(self, version: int) -> bool:
        """Whether all rollouts that are there serve this version."""
        return self.serving[version] == len(self.replicas)

    def wake_all(self) -> None:
        """Something changed that may let a rollout go on."""
        for replica in self.replicas.values():
            replica.wake.set()

    def wake_those_of(self, relay: Relay) -> None:
        """Something changed at this relay."""
        for replica in self._by_relay.get(relay.rank, {}).values():
            replica.wake.set()

    def orphan(self, trajectory: Trajectory) -> None:
        """No rollout has it any more: whoever serves its version may go on with it."""
        self._pool.orphan(trajectory)
        self._events.emit(TrajectoryOrphaned(trajectory=trajectory))
        self.wake_all()

    def _on_ready(self, worker: Worker) -> None:
        """A rollout can take work: give it a driver. It gets no trajectory before it has pulled weights."""
        if self._spawn is None:
            return  # the run has not started; `start` takes it in
        replica = Replica(
            name=worker.name,
            relay=self._relays.relay_for(worker),
            clock=StateClock("weights", self._now),
            last_token_at=self._now(),
        )
        self._restarting.pop(worker.name, None)
        self.replicas[replica.name] = replica
        self.serving[replica.policy_version] += 1
        self.relay_of[replica.name] = replica.relay
        self._by_relay.setdefault(replica.relay.rank, {})[replica.name] = replica
        replica.tasks = [self._spawn(live(replica), f"{live.__name__} {replica.name}") for live in self._lives]

    def _on_lost(self, worker: Worker, reason: str) -> None:
        """Its trajectories wait for another rollout of their version; it is started anew, a few times.

        Raises:
            WorkerLost: it was lost before it had ever been ready.
        """
        replica = self.replicas.pop(worker.name, None)
        if self._spawn is None or (replica is None and worker.name not in self._restarting):
            raise WorkerLost(f"{worker.name} did not start: {reason}")
        trajectories = 0
        if replica is not None:
            for task in replica.tasks:
                task.cancel()
            replica.stopped.set()
            for trajectory in (*replica.in_flight.values(), *self._pool.destined(replica.name)):
                self.orphan(trajectory)
                trajectories += 1
            for trajectory in self._pool.in_environment(replica.name):
                self._pool.rehome(trajectory, "")
            replica.in_flight.clear()
            self.serving[replica.policy_version] -= 1
            del self._by_relay[replica.relay.rank][replica.name]
        self._events.emit(RolloutLost(rollout=worker.name, reason=reason, trajectories=trajectories))
        self._events.emit(Notice(level="warning", text=f"{worker.name} was lost: {reason}"))
        if replica is not None:  # else it is being brought back, and whoever does that is told by the registry
            self._restart_number += 1
            self._restarting[worker.name] = self._restart_number
            self._spawn(self._bring_back(worker, self._restart_number, reason), f"restart {worker.name}")
        self.wake_all()

    async def _bring_back(self, worker: Worker, number: int, reason: str) -> None:
        """Start it anew until it is ready, as often as `rollout.restarts` allows; then go on without it.

        Raises:
            RunFailed: it was the last.
        """
        name = worker.name
        while self._restarts_left.get(worker.index, 0) > 0:
            self._restarts_left[worker.index] -= 1
            self._events.emit(WorkerReplaced(worker=name, reason=reason))
            try:
                await self._restart(name, reason)
                await self._registry.wait_until_ready(self._start_limit_s, [name])
                return
            except (WorkerLost, RunFailed) as error:
                if self._restarting.get(name) != number:
                    return  # it had been ready, and was lost again: another restart is under way
                reason = str(error)
                self._registry.lost(name, reason)
        self._restarting.pop(name, None)
        self._leave(name, f"{reason} (rollout.restarts is used up)")

    def _leave(self, name: str, reason: str) -> None:
        """The run goes on without this rollout.

        Raises:
            RunFailed: it was the last.
        """
        if not self.replicas and not self._restarting:
            raise RunFailed(f"no rollout is left: {name}: {reason}")
        self._registry.dismiss(name)
        self.relay_of.pop(name, None)
        self.wake_all()
        self._events.emit(Notice(level="warning", text=f"going on without {name}: {reason}"))

"""Repack: asks each rollout for its load, plans with the pure planner, and moves trajectories.

  RolloutLoad (one poll per rollout) --> [ plan ] --> [ move: stop at the source, go on at the target ]

A move stops the source's trajectories; each comes back with its last tokens and waits for the target, which leases it as
soon as it can. A source that dies half-way leaves orphans, a target that dies too: both go on elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from laminar.config.schema import RepackConfig
from laminar.controller.kv_exports import moving_pays
from laminar.controller.repack_planner import Move, RepackBounds, RolloutObservation, plan
from laminar.controller.replica import Replica
from laminar.controller.rollout_driver import RolloutDriver
from laminar.controller.rollout_manager import RolloutManager
from laminar.controller.worker_registry import WorkerRegistry
from laminar.errors import WorkerLost
from laminar.observability.events import EventBus, RolloutsRepacked, WeightsPublished
from laminar.protocol import messages


class Repacker:
    """Polls, plans and moves, while `repack.enabled`."""

    def __init__(
        self,
        manager: RolloutManager,
        driver: RolloutDriver,
        registry: WorkerRegistry,
        events: EventBus,
        config: RepackConfig,
        *,
        limit_s: float,
    ) -> None:
        """`limit_s`: longest time that a source may take to stop."""
        self._manager = manager
        self._driver = driver
        self._registry = registry
        self._events = events
        self._interval_s = config.interval_s
        self._bounds = RepackBounds(kv_ceiling=config.kv_ceiling, batch_bound=config.batch_bound)
        self._move_kv = config.move_kv
        self._limit_s = limit_s
        self._published = asyncio.Event()
        events.subscribe(lambda _: self._published.set(), WeightsPublished)

    async def poll_forever(self, replica: Replica) -> None:
        """Ask one rollout for its load; the answer comes to the rollout manager."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._registry.send(replica.name, messages.ReportLoad())
            except WorkerLost:
                return

    async def repack_forever(self) -> None:
        """Plan at every interval, and right after each publish.

        Consumes observed loads, waits for the interval or a publish, unblocks the drivers of emptied rollouts.
        """
        async with asyncio.TaskGroup() as moves:
            while True:
                try:
                    async with asyncio.timeout(self._interval_s):
                        await self._published.wait()
                except TimeoutError:
                    pass
                self._published.clear()
                # An emptied rollout gains nothing where no group may start, and the target's trajectories get slower.
                if not self._manager.room_for_more():
                    continue
                for move in plan(self._observations(), self._bounds).moves:
                    moves.create_task(self._move(move), name=f"repack {move.source} -> {move.target}")

    def _observations(self) -> Sequence[RolloutObservation]:
        published = self._manager.relays.published_version
        return [
            RolloutObservation(
                rollout=replica.name,
                policy_version=replica.policy_version,
                running=replica.observed.running,
                waiting=replica.observed.waiting,
                kv_utilization=replica.observed.kv_utilization,
                previous_kv_utilization=replica.observed_before.kv_utilization,
                previous_running=replica.observed_before.running,
                draining=published > replica.policy_version,
            )
            for replica in self._manager.replicas.values()
            if replica.observed is not None
            and replica.observed_before is not None
            and replica.in_flight
            and replica.stopping_for is None
            and not replica.receiving
            and self._manager.fleet.takes_work(replica)
        ]

    async def _move(self, move: Move) -> None:
        replicas = self._manager.replicas
        source, target = replicas.get(move.source), replicas.get(move.target)
        if source is None or target is None or source.policy_version != target.policy_version:
            return
        if not source.in_flight or source.leasing or source.stopping_for is not None or target.stopping_for is not None:
            return
        started = asyncio.get_running_loop().time()
        moved = list(source.in_flight.values())
        source.stopped.clear()
        target.receiving += 1
        try:
            pays = self._move_kv == "auto" and moving_pays(source.load, target.load)
            export_kv = pays or self._move_kv == "always"
            await self._driver.stop(source, target.name, export_kv=export_kv)
            async with asyncio.timeout(self._limit_s):
                await source.stopped.wait()
        except WorkerLost:
            return  # the source is gone; its trajectories are orphans
        except TimeoutError:
            self._registry.lost(source.name, f"did not stop its trajectories within {self._limit_s:g} s")
            return
        finally:
            target.receiving -= 1
            target.wake.set()
        gone_on = [trajectory for trajectory in moved if trajectory.rollout == target.name]
        self._events.emit(
            RolloutsRepacked(
                source=source.name,
                target=target.name,
                trajectories=len(gone_on),
                tokens=sum(len(t.prompt.token_ids) + t.num_tokens for t in gone_on),
                seconds=asyncio.get_running_loop().time() - started,
            )
        )

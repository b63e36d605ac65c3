"""Repack: asks each rollout for its load, plans with the pure planner, and moves trajectories.

  poll of rollout k (one coroutine each) --RolloutLoad--> [ plan, when all have answered ] --> [ move: stop, go on ]
       every interval, and at a publish

Invariants: a plan uses each observation once, so it never acts on the same load twice; a trajectory that a target refuses or that a
death leaves without a rollout is destined for another, or an orphan that goes on elsewhere: never dropped.

A move stops the source's trajectories; each comes back with its last tokens and waits for the target, which leases it as
soon as it can. A source that dies half-way leaves orphans, a target that dies too: both go on elsewhere.
"""

from __future__ import annotations

import asyncio

from laminar.config.schema import RepackConfig
from laminar.controller.kv_exports import moving_pays
from laminar.controller.repack_inputs import RepackInputs
from laminar.controller.repack_ledger import RepackLedger
from laminar.controller.repack_planner import Move, RepackPlan, plan
from laminar.controller.replica import Replica
from laminar.controller.rollout_driver import RolloutDriver
from laminar.controller.rollout_manager import RolloutManager
from laminar.controller.worker_registry import WorkerRegistry
from laminar.errors import WorkerLost
from laminar.observability.events import EventBus, RolloutsRepacked, WeightsPublished
from laminar.protocol import messages

UNUSED_FACTOR = 12  # while nothing may be moved loads are for people only, and come so much less often


class Repacker:
    """Polls and plans; moves while `repack.enabled`, or when a person asks for it."""

    def __init__(
        self,
        manager: RolloutManager,
        driver: RolloutDriver,
        registry: WorkerRegistry,
        inputs: RepackInputs,
        events: EventBus,
        config: RepackConfig,
        *,
        limit_s: float,
    ) -> None:
        """`limit_s`: longest time that a source may take to stop."""
        self.inputs = inputs
        self._ledger = RepackLedger(events, asyncio.get_running_loop().time)
        self._manager = manager
        self._driver = driver
        self._registry = registry
        self._events = events
        self._enabled = config.enabled
        self._poll_s = config.interval_s * (1 if config.enabled else UNUSED_FACTOR)
        self._patience_s = 2 * config.interval_s  # for the answers to a poll
        self._move_kv = config.move_kv
        self._limit_s = limit_s
        self._asked = False  # a person wants trajectories moved now
        self._unheard: set[str] = set()  # rollouts that have not answered since the last plan
        self._all_heard = asyncio.Event()
        manager.on_observed = self._on_observed
        if config.enabled:
            events.subscribe(lambda _: self._poll_all(), WeightsPublished)

    async def poll_forever(self, replica: Replica) -> None:
        """Ask one rollout for its load, at every interval and whenever a plan is wanted; the rollout manager hears the answer."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.call_later(self._poll_s, replica.poll.set)
            try:
                await replica.poll.wait()
            finally:
                due.cancel()
            replica.poll.clear()
            try:
                await self._registry.send(replica.name, messages.ReportLoad())
            except WorkerLost:
                return

    async def repack_forever(self) -> None:
        """Plan whenever all rollouts have answered a poll; with those that have, when one does not for an interval longer.

        Consumes observed loads, waits for them, unblocks the drivers of emptied rollouts.
        """
        async with asyncio.TaskGroup() as moves:
            while True:
                try:
                    async with asyncio.timeout(self._patience_s):
                        await self._all_heard.wait()
                except TimeoutError:
                    pass
                wanted, self._asked = self._enabled or self._asked, False
                found = self.plan(only_fresh=True).moves if wanted else []
                self._use_up_observations()
                for move in found:
                    moves.create_task(self._move(move), name=f"repack {move.source} -> {move.target}")

    def repack_now(self) -> int:
        """Have all rollouts say their load now, and move what the plan that follows says; returns how many are asked."""
        self._asked = True
        self._poll_all()
        return len(self._manager.replicas)

    def plan(self, *, only_fresh: bool = False) -> RepackPlan:
        """What would be moved now, and for every other rollout why it is not emptied.

        Args:
            only_fresh: leave out rollouts whose newest load an earlier plan has used.
        """
        observations, reasons = [], {}
        for replica in self._manager.replicas.values():
            if why_not := self.inputs.why_not_observed(replica):
                reasons[replica.name] = why_not
            elif only_fresh and not replica.is_fresh:
                reasons[replica.name] = "it has not said its load since the last plan"
            else:
                observations.append(self.inputs.observation(replica))
        planned = plan(observations, self.inputs.bounds())
        return RepackPlan(moves=planned.moves, reasons=reasons | planned.reasons)

    def _poll_all(self) -> None:
        self._use_up_observations()
        for replica in self._manager.replicas.values():
            replica.poll.set()

    def _use_up_observations(self) -> None:
        self._all_heard.clear()
        self._unheard = set(self._manager.replicas)
        for replica in self._manager.replicas.values():
            replica.is_fresh = False

    def _on_observed(self, replica: Replica) -> None:
        if replica.observed is not None and replica.observed.steps is not None:
            self.inputs.add_steps(replica, replica.observed.steps)
        self._unheard.discard(replica.name)
        if not any(name in self._manager.replicas for name in self._unheard):  # others are gone
            self._all_heard.set()

    async def _move(self, move: Move) -> None:
        replicas = self._manager.replicas
        source, target = replicas.get(move.source), replicas.get(move.target)
        if source is None or target is None or source.policy_version != target.policy_version:
            return
        if not source.in_flight or source.leasing or source.stopping_for is not None or target.stopping_for is not None:
            return
        if self._manager.room_on(target) < len(source.in_flight):
            return  # it has filled up since it said its load
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
            self._manager.release_what_has_no_room(target)
            target.wake.set()
        gone_on = [trajectory for trajectory in moved if trajectory.rollout == target.name]
        self._ledger.moved(move, gone_on, stopped_at=started)
        self._events.emit(
            RolloutsRepacked(
                source=source.name,
                target=target.name,
                trajectories=len(gone_on),
                tokens=sum(len(t.prompt.token_ids) + t.num_tokens for t in gone_on),
                seconds=asyncio.get_running_loop().time() - started,
                costs_s=move.costs_s,
            )
        )

"""The rollouts of the run: who is there, who comes, who is brought back, who leaves.

Invariants: a rollout gets a driver when it is ready and loses it when it is lost or leaves; its trajectories become orphans in
the same moment. `fleet_health.py` decides what a loss means; the run ends only when no rollout is left and none may come.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.controller.fleet_health import FleetHealth, Health, Member
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.recoveries import Recoveries
from laminar.controller.relay import Relay
from laminar.controller.relay_manager import RelayManager
from laminar.controller.replica import Replica
from laminar.controller.state_clock import StateClock
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import (
    EventBus,
    Notice,
    RolloutHealthChanged,
    RolloutLost,
    TrajectoryOrphaned,
    WorkerReplaced,
)
from laminar.protocol.messages import Leaving, RolloutJoined
from laminar.trajectory import Trajectory, TrajectoryState

Restart = Callable[[str, str], Awaitable[None]]
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
Live = Callable[[Replica], Coroutine[Any, Any, None]]

LOOKS_PER_LIMIT = 4  # at the heartbeats, within rollout.suspect_after_s


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
        """`restart(name, reason)` starts a rollout's process (anew), or raises WorkerLost if it cannot."""
        self.replicas: dict[str, Replica] = {}
        self.serving: Counter[int] = Counter()  # rollouts by version
        self._at_work: int | None = None  # None: to be counted again
        self.relay_of: dict[str, Relay] = {}  # rollouts of the run, those included that are being brought back
        self.by_hand = config.launch.rollouts == "manual"  # whoever starts them brings them back
        rollout = config.rollout
        self.health = FleetHealth(
            restarts=rollout.restarts,
            host_failures=rollout.host_failures,
            suspect_after_s=rollout.suspect_after_s,
            may_return=self.by_hand,
            on_change=self._on_health,
        )
        self._replicas = rollout.replicas
        self._registry = registry
        self._events = events
        self._relays = relays
        self._pool = pool
        self._restart = restart
        self._suspect_after_s, self._silence_limit_s = rollout.suspect_after_s, rollout.silence_limit_s
        self._start_limit_s = config.controller.start_timeout_s
        self._restarting: dict[str, asyncio.Task[None]] = {}  # by name: the (re)start that is under way
        self._without_relay: dict[str, Worker] = {}  # ready, and no relay is on their host yet
        self._by_relay: dict[int, dict[str, Replica]] = {}  # rollouts that are there
        self._came = asyncio.Event()  # a rollout is there
        # Rollouts that an earlier controller knew, until they come back or are given up, with what they hold by the journal.
        self._awaited: dict[str, dict[str, Trajectory]] = {}
        self._homes: dict[str, list[Trajectory]] = {}  # by such a rollout: what environments had of it then
        self._joined: dict[str, RolloutJoined] = {}  # what those say that they hold
        self._spawn: Spawn | None = None
        self._lives: Sequence[Live] = ()
        self._now = asyncio.get_running_loop().time
        self._recoveries = Recoveries(events, self._now)
        for index in range(rollout.replicas):
            self.health.starts(f"rollout-{index}", self._now())
        registry.on_lost("rollout", self._on_lost)
        registry.on_ready("rollout", self._on_ready)
        registry.may_join("rollout", self.health.refusal)
        registry.handle(Leaving, self._on_leaving)
        registry.handle(RolloutJoined, self._on_joined)

    def start(self, spawn: Spawn, lives: Sequence[Live]) -> None:
        """Take all ready rollouts in, now and later.

        Args:
            spawn: makes tasks that belong to the run.
            lives: coroutines that run for each rollout until it is lost: its driver, its polls.

        Raises:
            RunFailed: one of them has no relay on its host.
        """
        self._spawn, self._lives = spawn, lives
        for name in self._registry.names("rollout"):
            worker = self._registry.workers[name]
            self._take_in(worker, self._relays.relay_for(worker))

    async def watch_forever(self) -> None:
        """Notice rollouts that fall silent: they get nothing new, and after a while count as lost."""
        while True:
            await asyncio.sleep(self._suspect_after_s / LOOKS_PER_LIMIT)
            for name, replica in list(self.replicas.items()):
                heard = self._registry.workers[name].last_heard
                if self.health.heard(name, heard, self._now()):
                    replica.wake.set()
                silent = self._now() - heard
                if silent > self._silence_limit_s:
                    self._registry.lost(name, f"silent for {silent:.0f} s (rollout.silence_limit_s)")

    @property
    def begun(self) -> bool:
        """Whether all rollouts of the config have been ready, so that others may come and any may leave."""
        return self._spawn is not None

    # ------------------------------------------------------------ taken over from another controller

    def take_back(
        self, trajectories: Iterable[Trajectory], members: Mapping[str, str], patience_s: Callable[[str], float]
    ) -> None:
        """After `start`: rollouts, with these trajectories, were there under an earlier controller.

        Args:
            trajectories: in progress; `rollout` says who had them, in the pool or with an environment.
            members: health of the rollouts that have joined or left since the config was written, by name.
            patience_s: how long each may take to come back; then it is started anew.
        """
        assert self._spawn is not None
        for name, health in members.items():
            if health in (Health.LEFT.value, Health.EVICTED.value):
                self.health.left(name, self._now(), "it had left before the controller was started again")
                self._registry.dismiss(name)
            elif self.health.health(name) is Health.LEFT:
                self.health.starts(name, self._now())
                self._registry.expect_worker(name)
        self._awaited = {name: {} for name, member in self.health.members.items() if member.health is Health.STARTING}
        for trajectory in trajectories:
            mine = self._awaited.get(trajectory.rollout or "")
            if trajectory.state is TrajectoryState.ENVIRONMENT:
                self._homes.setdefault(trajectory.rollout or "", []).append(trajectory)
                trajectory.rollout = None  # it comes back as an orphan, unless its rollout is back by then
            elif mine is not None:
                mine[trajectory.trajectory_id] = trajectory
            elif trajectory.state is TrajectoryState.GENERATING:
                self.orphan(trajectory)
        for name in self._awaited:
            self._restarting[name] = self._spawn(self._await_back(name, patience_s(name)), f"await {name}")
        if not self._awaited:
            reason = "all had left before the controller was started again"
            self._spawn(self._wait_for_another(reason), "wait for a rollout")

    async def _await_back(self, name: str, patience_s: float) -> None:
        mine = asyncio.current_task()
        try:
            await self._registry.wait_until_ready(patience_s, [name])
        except (WorkerLost, RunFailed) as error:
            if self._restarting.get(name) is not mine:
                return
            reason = f"it has not come back to the new controller: {error}"
            trajectories = len(self._awaited.get(name, {}))
            self._settle(name)
            self._events.emit(RolloutLost(rollout=name, reason=reason, trajectories=trajectories))
            del self._restarting[name]
            self._failed(name, self.health.members[name].host, reason)

    def _settle(self, name: str) -> None:
        """What this rollout held and does not hold any more goes on elsewhere."""
        for trajectory in self._awaited.pop(name, {}).values():
            if self._pool.get(trajectory.trajectory_id) is trajectory:  # else its group was dropped meanwhile
                self.orphan(trajectory)

    def _on_joined(self, worker: Worker, message: RolloutJoined) -> None:
        self._joined[worker.name] = message

    def _claim(self, replica: Replica) -> None:
        """It has come back to a new controller: what it holds, by its own word and the journal's, it goes on with."""
        held = self._joined.pop(replica.name, None)
        awaited = self._awaited.get(replica.name, {})
        if held is not None:
            replica.policy_version = held.policy_version
            if held.policy_version >= 0:
                self.health.serves(replica.name, self._now())
            for trajectory_id, lease in zip(held.trajectory_ids, held.leases, strict=True):
                trajectory = awaited.get(trajectory_id)
                if trajectory is None or self._pool.get(trajectory_id) is not trajectory:
                    replica.to_abort.append(trajectory_id)
                elif trajectory.lease == lease:
                    replica.in_flight[trajectory_id] = awaited.pop(trajectory_id)
            for trajectory in self._homes.pop(replica.name, []):
                at_environment = trajectory.state is TrajectoryState.ENVIRONMENT and trajectory.rollout is None
                if at_environment and held.policy_version == trajectory.policy_version:
                    self._pool.rehome(trajectory, replica.name)
        self._settle(replica.name)

    # ------------------------------------------------------------ what they serve

    def pulled(self, replica: Replica, version: int) -> None:
        """A rollout serves this version now."""
        self.serving[replica.policy_version] -= 1
        replica.policy_version = version
        replica.forget_observations()
        self.serving[version] += 1
        self.health.serves(replica.name, self._now())

    def all_serve(self, version: int) -> bool:
        """Whether all rollouts that are there serve this version."""
        return self.serving[version] == len(self.replicas)

    def takes_work(self, replica: Replica) -> bool:
        """Whether it may be given trajectories."""
        return self.health.takes_work(replica.name)

    def is_suspect(self, replica: Replica) -> bool:
        """Whether it is not heard."""
        return self.health.health(replica.name) is Health.SUSPECT

    @property
    def at_work(self) -> int:
        """Rollouts that share what is to be generated."""
        if self._at_work is None:  # asked at every fill of every rollout
            health = self.health.health
            self._at_work = sum(health(name) in (Health.STARTING, Health.HEALTHY) for name in self.replicas)
        return self._at_work

    def wake_all(self) -> None:
        """Something changed that may let a rollout go on."""
        for replica in self.replicas.values():
            replica.wake.set()

    def relay_changed(self, relay: Relay) -> None:
        """Something changed at this relay: that concerns the rollouts on its host."""
        for replica in self._by_relay.get(relay.rank, {}).values():
            replica.wake.set()
        for name, worker in list(self._without_relay.items()):
            if worker.host == relay.host:
                del self._without_relay[name]
                self._take_in(worker, self._relays.relay_for(worker))

    def orphan(self, trajectory: Trajectory) -> None:
        """No rollout has it any more: whoever serves its version may go on with it."""
        rollout = trajectory.rollout or ""
        self._pool.orphan(trajectory)
        self._recoveries.orphaned(trajectory, rollout)
        self._events.emit(TrajectoryOrphaned(trajectory=trajectory))
        self.wake_all()

    # ------------------------------------------------------------ coming

    def add(self, count: int) -> list[str]:
        """Start so many more rollouts, each on the devices of one that has left if there is one; returns their names."""
        names = []
        for _ in range(count):
            name = f"rollout-{self.health.free_index()}"
            self.health.starts(name, self._now(), "it was added")
            self._registry.expect_worker(name)
            self._start_process(name, "it was added")
            names.append(name)
        return names

    def _on_ready(self, worker: Worker) -> None:
        """A rollout can take work: give it a driver. It gets no trajectory before it has pulled weights."""
        self.health.came(worker.name, worker.host, self._now())
        if self._spawn is None:
            return  # the run has not started; `start` takes it in
        self._restarting.pop(worker.name, None)
        try:
            relay = self._relays.relay_for(worker)
        except RunFailed as error:  # its host has just joined the run: the relay may come after it
            self._without_relay[worker.name] = worker
            self._events.emit(Notice(level="warning", text=f"{worker.name} waits: {error}"))
            return
        self._take_in(worker, relay)

    def _take_in(self, worker: Worker, relay: Relay) -> None:
        assert self._spawn is not None
        replica = Replica(
            name=worker.name,
            host=worker.host,
            relay=relay,
            clock=StateClock("weights", self._now),
            last_token_at=self._now(),
        )
        self._claim(replica)
        self.replicas[replica.name] = replica
        self._at_work = None
        self.serving[replica.policy_version] += 1
        self.relay_of[replica.name] = replica.relay
        self._by_relay.setdefault(replica.relay.rank, {})[replica.name] = replica
        self._came.set()
        replica.tasks = [self._spawn(live(replica), f"{live.__name__} {replica.name}") for live in self._lives]

    # ------------------------------------------------------------ being lost, and brought back

    def _on_lost(self, worker: Worker, reason: str) -> None:
        """Its trajectories wait for another rollout of their version; it is started anew, a few times.

        Raises:
            WorkerLost: it was lost before the run had begun.
            RunFailed: it was the last.
        """
        name = worker.name
        if self._spawn is None:
            if worker.index < self._replicas:
                raise WorkerLost(f"{name} did not start: {reason}")
            self._registry.dismiss(name)  # nobody has counted on it
            return
        self._without_relay.pop(name, None)
        self._joined.pop(name, None)
        replica = self.replicas.get(name)
        trajectories = 0 if replica is None else self._take_out(replica)
        self._events.emit(RolloutLost(rollout=name, reason=reason, trajectories=trajectories))
        self._events.emit(Notice(level="warning", text=f"{name} was lost: {reason}"))
        if name not in self._restarting:  # else whoever brings it back is told by the registry
            self._failed(name, worker.host, reason)
        self.wake_all()

    def _take_out(self, replica: Replica) -> int:
        """It is not there any more; returns how many of its trajectories are orphans now."""
        del self.replicas[replica.name]
        self._at_work = None
        mine = asyncio.current_task()
        for task in replica.tasks:
            if task is not mine:
                task.cancel()
        replica.stopped.set()
        trajectories = [*replica.in_flight.values(), *self._pool.destined(replica.name)]
        for trajectory in trajectories:
            self.orphan(trajectory)
        for trajectory in self._pool.in_environment(replica.name):
            self._pool.rehome(trajectory, "")
        replica.in_flight.clear()
        self.serving[replica.policy_version] -= 1
        del self._by_relay[replica.relay.rank][replica.name]
        return len(trajectories)

    def _failed(self, name: str, host: str, reason: str) -> None:
        """It was lost, or did not come back: what becomes of it is for the state machine to say."""
        if name not in self.health.members:  # it came by itself, and was lost before it was ready
            self.health.came(name, host, self._now())
        evicted = dict(self.health.evicted_hosts)
        verdict = self.health.lost(name, self._now(), reason)
        for other in self.health.of_host(host) if host in self.health.evicted_hosts.keys() - evicted.keys() else ():
            self.leave(other, f"its host is evicted: {self.health.evicted_hosts[host]}", moves_after_s=0)
        if verdict is not Health.RESTARTING:
            self._go_on_without(name)
        elif name not in self._restarting:
            self._start_process(name, reason)

    def _start_process(self, name: str, reason: str) -> None:
        assert self._spawn is not None
        self._restarting[name] = self._spawn(self._bring_back(name, reason), f"restart {name}")

    async def _bring_back(self, name: str, reason: str) -> None:
        """Start it (anew) until it is ready, as often as its health allows.

        Raises:
            RunFailed: it was the last.
        """
        mine = asyncio.current_task()
        while self._restarting.get(name) is mine:
            try:
                if not self.by_hand:
                    self._events.emit(WorkerReplaced(worker=name, reason=reason))
                    await self._restart(name, reason)
                await self._registry.wait_until_ready(self._start_limit_s, [name])
                return
            except (WorkerLost, RunFailed) as error:
                if self._restarting.get(name) is not mine:
                    return  # it had been ready, and was lost again: another restart is under way
                reason = str(error)
                self._registry.lost(name, reason)
                if self.by_hand:
                    self.health.left(name, self._now(), f"it has not come back: {reason}")
                    self._go_on_without(name)
                else:
                    self._failed(name, self.health.members[name].host, reason)

    # ------------------------------------------------------------ leaving

    def leave(self, name: str, reason: str, *, moves_after_s: float | None) -> None:
        """It is to leave: it gets nothing new, and goes when it has nothing left.

        Args:
            moves_after_s: what it still has then goes on elsewhere; None: it finishes what it has.
        """
        replica = self.replicas.get(name)
        if replica is None:  # it is on its way: should it come, it is turned away
            if (start := self._restarting.pop(name, None)) is not None:
                start.cancel()
            self._without_relay.pop(name, None)
            self.health.left(name, self._now(), reason)
            self._go_on_without(name)
            return
        self.health.leaves(name, self._now(), reason)
        replica.leaving = True
        for trajectory in self._pool.destined(name):
            self.orphan(trajectory)
        for trajectory in self._pool.in_environment(name):
            self._pool.rehome(trajectory, "")
        if moves_after_s is not None:
            asyncio.get_running_loop().call_later(moves_after_s, self._move_out, replica)
        self.wake_all()

    def _move_out(self, replica: Replica) -> None:
        replica.moves_out = True
        replica.wake.set()

    async def let_go(self, replica: Replica) -> None:
        """A leaving rollout has nothing left: it is told to end.

        Raises:
            RunFailed: it was the last, and none may come.
        """
        self._take_out(replica)
        reason = self.health.members[replica.name].reason
        self.health.left(replica.name, self._now(), reason)
        await self._registry.release(replica.name, reason)
        self._go_on_without(replica.name)

    def _on_leaving(self, worker: Worker, message: Leaving) -> None:
        if worker.name in self.replicas and self.health.health(worker.name) is not Health.DRAINING:
            reason = f"it must be gone in {message.seconds:g} s (SIGTERM)"
            self.leave(worker.name, reason, moves_after_s=message.seconds / 2)

    def _go_on_without(self, name: str) -> None:
        """The run goes on without this rollout.

        Raises:
            RunFailed: it was the last, and none may come.
        """
        self._restarting.pop(name, None)
        self._registry.dismiss(name)
        self.relay_of.pop(name, None)
        member = self.health.members[name]
        neighbour = next((replica for replica in self.replicas.values() if replica.host == member.host), None)
        if neighbour is not None:
            neighbour.exporters_gone.append(name)
        text = f"going on without {name}: {member.reason}"
        if not self.replicas and not self._restarting and not self._without_relay:
            if member.health is Health.EVICTED and not self.by_hand:
                raise RunFailed(f"no rollout is left: {name}: {member.reason}")
            assert self._spawn is not None
            self._came.clear()
            text += f"; none is left, waiting {self._start_limit_s:g} s for another (controller.start_timeout_s)"
            self._spawn(self._wait_for_another(text), "wait for a rollout")
        self.wake_all()
        self._events.emit(Notice(level="warning", text=text))

    async def _wait_for_another(self, reason: str) -> None:
        try:
            async with asyncio.timeout(self._start_limit_s):
                await self._came.wait()
        except TimeoutError:
            raise RunFailed(f"no rollout is left: {reason}") from None

    def _on_health(self, member: Member) -> None:
        self._at_work = None
        event = RolloutHealthChanged(rollout=member.name, health=member.health.value, reason=member.reason)
        self._events.emit(event)

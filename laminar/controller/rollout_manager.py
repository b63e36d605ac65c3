"""Assignment of trajectories to rollouts, what comes back, and what happens when a rollout is lost.

Invariants: a trajectory in progress is held by one rollout, or waits in the partial response pool, never both; a lost
rollout's trajectories go on with all their tokens, or are started anew by `rollout.on_lost_version`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.controller.experience_buffer import ExperienceBuffer
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.prompt_pool import PromptPool
from laminar.controller.relay_manager import Relay, RelayManager
from laminar.controller.replica import Replica
from laminar.controller.run_control import RunControl
from laminar.controller.schedules.schedule import Schedule
from laminar.controller.state_clock import StateClock
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import (
    EventBus,
    GroupDropped,
    Notice,
    RolloutLost,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryMoved,
    TrajectoryOrphaned,
    TrajectoryRestarted,
    TrajectoryStarted,
    WorkerReplaced,
)
from laminar.protocol import messages
from laminar.trajectory import Group, Prompt, Trajectory, TrajectoryState

Restart = Callable[[str, str], Awaitable[None]]
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
Live = Callable[[Replica], Coroutine[Any, Any, None]]


class RolloutManager:
    """The replicas of the run; `RolloutDriver` has the coroutine that drives each of them."""

    def __init__(
        self,
        registry: WorkerRegistry,
        events: EventBus,
        relays: RelayManager,
        prompts: PromptPool,
        pool: PartialResponsePool,
        buffer: ExperienceBuffer,
        schedule: Schedule,
        control: RunControl,
        config: ExperimentConfig,
        *,
        restart: Restart,
    ) -> None:
        """`restart(name, reason)` starts a lost rollout anew, or raises WorkerLost if it cannot."""
        self.replicas: dict[str, Replica] = {}
        self.pool = pool
        self.relays = relays
        self.schedule = schedule
        self.control = control
        self.prompts = prompts
        self._registry = registry
        self._events = events
        self._buffer = buffer
        self._restart = restart
        self._group_size = config.trainer.group_size
        self._max_running = config.rollout.max_running
        self._max_response_tokens = config.rollout.max_response_tokens
        self._regenerate = config.rollout.on_lost_version == "regenerate"
        self._restarts_left = dict.fromkeys(range(config.rollout.replicas), config.rollout.restarts)
        self._start_limit_s = config.controller.start_timeout_s
        self._seed = config.seed
        self._next_group = 0
        self._restarting: dict[str, int] = {}  # by name: number of the restart that is under way
        self._restart_number = 0
        self._relay_of: dict[str, Relay] = {}  # rollouts of the run, those included that are being brought back
        self._by_relay: dict[int, dict[str, Replica]] = {}  # rollouts that are there
        self._serving: Counter[int] = Counter()  # rollouts by version
        self._rescuers: dict[int, str] = {}  # version of orphans -> rollout that takes it to go on with them
        self._spawn: Spawn | None = None
        self._lives: Sequence[Live] = ()
        self._now = asyncio.get_running_loop().time
        registry.handle(messages.TrajectoryDeltas, self._on_deltas)
        registry.handle(messages.RolloutLoad, self._on_load)
        registry.on_lost("rollout", self._on_lost)
        registry.on_ready("rollout", self._on_ready)
        events.subscribe(lambda event: self._withdraw(event.group), GroupDropped)

    def start(self, spawn: Spawn, lives: Sequence[Live]) -> None:
        """Take all ready rollouts in, now and later.

        Args:
            spawn: makes tasks that belong to the run.
            lives: coroutines that run for each rollout until it is lost: its driver, its polls.
        """
        self._spawn, self._lives = spawn, lives
        for name in self._registry.names("rollout"):
            self._on_ready(self._registry.workers[name])

    def relay_changed(self, relay: Relay) -> None:
        """It holds another version, or has come or gone: that concerns the rollouts on its host."""
        if self.schedule.synchronizes:
            self.wake_all()
            return
        for replica in self._by_relay.get(relay.rank, {}).values():
            replica.wake.set()

    def wake_all(self) -> None:
        """Something changed that may let a rollout go on."""
        for replica in self.replicas.values():
            replica.wake.set()

    # ------------------------------------------------------------ giving work

    def wanted_version(self, replica: Replica) -> int:
        """The version that this rollout should serve next: usually the newest that its relay holds."""
        own = replica.policy_version
        if self.schedule.interrupts:
            return max(own, replica.relay.stored_version)
        if replica.receiving or self.pool.destined(replica.name):
            return own
        if self.pool.orphans:
            self._settle_orphans()
            if own >= 0 and self.pool.has_orphans_for(own):
                return own  # they go on here before the newer weights come
            if not replica.in_flight and (version := self._version_to_rescue(replica)) is not None:
                return version
        return max(own, replica.relay.stored_version)

    def may_pull(self, replica: Replica, version: int) -> bool:
        """Whether a drained rollout may take this version now.

        Under a schedule that synchronizes, nobody takes new weights before all have drained and all can have them.
        """
        if not self.schedule.synchronizes or replica.policy_version < 0 or version < replica.relay.stored_version:
            return True
        published = self.relays.published_version
        return not self.pool.held and all(
            other.relay.stored_version >= published for other in self.replicas.values() if other.relay.versions
        )

    def pulled(self, replica: Replica, version: int) -> None:
        """A rollout serves this version now."""
        self._serving[replica.policy_version] -= 1
        replica.policy_version = version
        self._serving[version] += 1
        if self.schedule.synchronizes and self._serving[version] == len(self.replicas):
            self.wake_all()

    def assignments(self, replica: Replica) -> tuple[messages.TrajectoryAssignment, ...]:
        """What this rollout should generate next, leased to it: what waits for it, then new groups."""
        room = self._max_running - len(replica.in_flight)
        waiting = self.pool.take_waiting(replica.name, replica.policy_version, room)
        leased = [self._lease(trajectory, replica) for trajectory in waiting]
        for trajectory in waiting:
            self._events.emit(TrajectoryMoved(trajectory=trajectory, rollout=replica.name))
        share = self._share(replica)
        while len(replica.in_flight) < share and self._may_start(replica):
            prompt = self.prompts.take()
            if prompt is None:
                break
            group = self._new_group(prompt, replica.policy_version)
            self._buffer.admit(group)
            for trajectory in group.trajectories:
                leased.append(self._lease(trajectory, replica))
                self._events.emit(TrajectoryStarted(trajectory=trajectory))
        return tuple(leased)

    def _share(self, replica: Replica) -> int:
        """Trajectories that each rollout would have if all that may start now were spread evenly over all.

        A rollout starts groups while it has fewer: otherwise the first to come would take all that the schedule admits.
        """
        total = self.pool.held + self._room(replica.policy_version) * self._group_size
        return min(self._max_running, -(-total // len(self.replicas)))

    def room_for_more(self) -> bool:
        """Whether a rollout that took the newest weights now could start a group."""
        return self._room(self.relays.published_version) > 0 and len(self.prompts) > 0

    def _room(self, version: int) -> int:
        return self.schedule.room(
            serving_version=version,
            published_version=self.relays.published_version,
            outstanding=self._buffer.outstanding,
            taken=self._buffer.taken,
            steps_left=self._buffer.steps_left,
        )

    def _may_start(self, replica: Replica) -> bool:
        return (
            not self.control.generation_paused
            and not self.control.stop_requested.is_set()
            and not replica.receiving
            and len(replica.in_flight) + self._group_size <= self._max_running
            and replica.policy_version >= replica.relay.stored_version
            and (not self.schedule.synchronizes or self._serving[replica.policy_version] == len(self.replicas))
            and self._room(replica.policy_version) > 0
        )

    def _new_group(self, prompt: Prompt, version: int) -> Group:
        group_id = self._next_group
        self._next_group += 1
        members = [
            Trajectory(trajectory_id=f"{group_id}.{member}", group_id=group_id, prompt=prompt)
            for member in range(self._group_size)
        ]
        return Group(group_id=group_id, prompt=prompt, trajectories=members, policy_version=version)

    def _lease(self, trajectory: Trajectory, replica: Replica) -> messages.TrajectoryAssignment:
        now = self._now()
        self.pool.lease(trajectory, rollout=replica.name, policy_version=replica.policy_version, now=now)
        if not replica.in_flight:
            replica.last_token_at = now
        replica.in_flight[trajectory.trajectory_id] = trajectory
        return messages.TrajectoryAssignment(
            trajectory_id=trajectory.trajectory_id,
            lease=trajectory.lease,
            policy_version=replica.policy_version,
            prompt_token_ids=trajectory.prompt.token_ids,
            token_ids=trajectory.response_token_ids(),
            max_new_tokens=self._max_response_tokens - trajectory.num_tokens,
            # The same trajectory gets the same seed in every run of a config.
            seed=zlib.crc32(f"{self._seed}/{trajectory.trajectory_id}".encode()) >> 1,
        )

    # ------------------------------------------------------------ taking in

    def _on_load(self, worker: Worker, message: messages.RolloutLoad) -> None:
        if replica := self.replicas.get(worker.name):
            replica.observe(message)

    def _on_deltas(self, worker: Worker, message: messages.TrajectoryDeltas) -> None:
        replica = self.replicas.get(worker.name)
        if replica is None:
            return
        replica.load = message.load
        now = self._now()
        late_before = self.pool.late_tokens
        ended = self.pool.take_in(message, now)
        for trajectory in ended:
            del replica.in_flight[trajectory.trajectory_id]
            self._ended(trajectory, replica)
        late = self.pool.late_tokens - late_before
        tokens = len(message.token_ids) - late
        replica.generated_tokens += tokens
        replica.last_token_at = now
        if ended or replica.to_abort:  # else there is nothing to do for its driver
            replica.wake.set()
        self._wake_if_drained()
        self._events.emit(
            TokensAppended(
                rollout=replica.name,
                tokens=tokens,
                late_tokens=late,
                kv_utilization=message.load.kv_utilization,
            )
        )

    def _ended(self, trajectory: Trajectory, replica: Replica) -> None:
        """A rollout is through with a trajectory: it has finished, or was stopped to go on elsewhere."""
        if trajectory.state is TrajectoryState.GENERATING:
            if trajectory.num_tokens < self._max_response_tokens:
                target = replica.stopping_for
                if target in self.replicas:
                    self.pool.destine(trajectory, target)
                else:
                    self._orphan(trajectory)
                return
            self.pool.finish(trajectory, "length", self._now())
        self._events.emit(TrajectoryFinished(trajectory=trajectory))

    def _withdraw(self, group: Group) -> None:
        """A group was dropped: stop its members that are still generated."""
        for trajectory in group.trajectories:
            if self.pool.get(trajectory.trajectory_id) is None:
                continue
            self.pool.withdraw(trajectory)
            replica = self.replicas.get(trajectory.rollout or "")
            if replica is not None and replica.in_flight.pop(trajectory.trajectory_id, None) is not None:
                replica.to_abort.append(trajectory.trajectory_id)
                replica.wake.set()
        self._wake_if_drained()

    def _wake_if_drained(self) -> None:
        """Under a schedule that synchronizes, the last to drain lets all others go on."""
        if self.schedule.synchronizes and not self.pool.held:
            self.wake_all()

    # ------------------------------------------------------------ coming and going

    def _on_ready(self, worker: Worker) -> None:
        """A rollout can take work: give it a driver. It gets no trajectory before it has pulled weights."""
        if self._spawn is None:
            return  # the run has not started; `start` takes it in
        replica = Replica(
            name=worker.name,
            relay=self.relays.relay_for(worker),
            clock=StateClock("weights", self._now),
            last_token_at=self._now(),
        )
        self._restarting.pop(worker.name, None)
        self.replicas[replica.name] = replica
        self._serving[replica.policy_version] += 1
        self._relay_of[replica.name] = replica.relay
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
            for trajectory in (*replica.in_flight.values(), *self.pool.destined(replica.name)):
                self._orphan(trajectory)
                trajectories += 1
            replica.in_flight.clear()
            self._serving[replica.policy_version] -= 1
            del self._by_relay[replica.relay.rank][replica.name]
            self._rescuers = {version: name for version, name in self._rescuers.items() if name != worker.name}
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
        self._relay_of.pop(name, None)
        self.wake_all()
        self._events.emit(Notice(level="warning", text=f"going on without {name}: {reason}"))

    def _orphan(self, trajectory: Trajectory) -> None:
        self.pool.orphan(trajectory)
        self._events.emit(TrajectoryOrphaned(trajectory=trajectory))
        self.wake_all()

    def _settle_orphans(self) -> None:
        """Start those anew whose version no rollout serves and none can pull."""
        if not self._regenerate or self.schedule.interrupts:
            return
        at_hand = {replica.policy_version for replica in self.replicas.values()} | {self.relays.published_version}
        for relay in self._relay_of.values():
            at_hand.update(relay.versions)
        for trajectory in list(self.pool.orphans.values()):
            if trajectory.versions and trajectory.policy_version not in at_hand:
                lost = self.pool.start_over(trajectory)
                self._events.emit(TrajectoryRestarted(trajectory=trajectory, lost_tokens=lost))

    def _version_to_rescue(self, replica: Replica) -> int | None:
        """A version that orphans need, nobody serves, and this rollout's relay holds; one rollout takes it."""
        served = {other.policy_version for other in self.replicas.values()}
        for trajectory in self.pool.orphans.values():
            version = trajectory.policy_version
            if version is None or not trajectory.versions or version in served or not replica.relay.holds(version):
                continue
            rescuer = self.replicas.get(self._rescuers.get(version, ""))
            if rescuer is None or not rescuer.relay.holds(version):
                self._rescuers[version] = replica.name
                return version
            if rescuer is replica:
                return version
        return None

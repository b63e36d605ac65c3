"""Assignment of trajectories to rollouts, and what comes back.

Invariants: a trajectory in progress is held by one rollout, or waits in the partial response pool, never both; an orphan goes
on with all its tokens, or is started anew by `rollout.on_lost_version`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

from laminar.config.held_out import max_evaluation_tokens
from laminar.config.schema import ExperimentConfig
from laminar.controller.evaluator import Evaluator
from laminar.controller.experience_buffer import ExperienceBuffer
from laminar.controller.kv_exports import KvExports
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.prompt_pool import PromptPool
from laminar.controller.relay import Relay
from laminar.controller.relay_manager import RelayManager
from laminar.controller.replica import Replica
from laminar.controller.rollout_fleet import RolloutFleet
from laminar.controller.run_control import RunControl
from laminar.controller.schedules.schedule import Schedule
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.observability.events import (
    EventBus,
    GroupDropped,
    KvMoved,
    Notice,
    RolloutsRepacked,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryMoved,
    TrajectoryRestarted,
    TrajectoryStarted,
    TurnEnded,
)
from laminar.protocol import messages
from laminar.trajectory import Group, Prompt, Trajectory, TrajectoryState


class RolloutManager:
    """What each rollout should do next; `RolloutDriver` has the coroutine that has it done."""

    def __init__(
        self,
        registry: WorkerRegistry,
        events: EventBus,
        fleet: RolloutFleet,
        relays: RelayManager,
        prompts: PromptPool,
        pool: PartialResponsePool,
        buffer: ExperienceBuffer,
        schedule: Schedule,
        control: RunControl,
        evaluator: Evaluator,
        config: ExperimentConfig,
        *,
        next_group: int = 0,
    ) -> None:
        """`next_group`: after those of earlier controllers of this run."""
        self.fleet = fleet
        self.pool = pool
        self.relays = relays
        self.schedule = schedule
        self.control = control
        self.prompts = prompts
        self.kv_exports = KvExports(fleet.replicas)
        self.evaluator = evaluator
        self._events = events
        self._buffer = buffer
        self._group_size = config.trainer.group_size
        self._max_running = config.rollout.max_running
        self._repacks = config.repack.enabled
        self._max_response_tokens = config.rollout.max_response_tokens
        self._max_evaluation_tokens = max_evaluation_tokens(config)
        self._evaluation_temperature = None if config.evaluation is None else config.evaluation.temperature
        self._regenerate = config.rollout.on_lost_version == "regenerate"
        self._seed = config.seed
        self._next_group = next_group
        self._rescuers: dict[int, str] = {}  # version of orphans -> rollout that takes it to go on with them
        self._now = asyncio.get_running_loop().time
        self.on_observed: Callable[[Replica], None] = lambda replica: None  # it has answered a poll
        registry.handle(messages.TrajectoryDeltas, self._on_deltas)
        registry.handle(messages.RolloutLoad, self._on_load)
        registry.handle(messages.KvTaken, self._on_kv_taken)
        events.subscribe(lambda event: self._withdraw(event.group), GroupDropped)

    @property
    def replicas(self) -> dict[str, Replica]:
        """Rollouts that are there, by name."""
        return self.fleet.replicas

    def relay_changed(self, relay: Relay) -> None:
        """It holds another version, or has come or gone: that concerns the rollouts on its host."""
        self.fleet.relay_changed(relay)
        if self.schedule.synchronizes:
            self.fleet.wake_all()

    # ------------------------------------------------------------ giving work

    def wanted_version(self, replica: Replica) -> int:
        """The version that this rollout should serve next: usually the newest that its relay holds."""
        own = replica.policy_version
        if self.schedule.interrupts:
            return own if self.evaluator.claim(replica) else max(own, replica.relay.stored_version)
        if replica.receiving or self.pool.destined(replica.name):
            return own
        if self.pool.in_environment(replica.name) and not self._hands_over(replica):
            return own
        if self.pool.orphans:
            self._settle_orphans()
            if own >= 0 and self.pool.has_orphans_for(own):
                return own  # they go on here before the newer weights come
            if not replica.in_flight and (version := self._version_to_rescue(replica)) is not None:
                return version
        return own if self.evaluator.claim(replica) else max(own, replica.relay.stored_version)

    def _hands_over(self, replica: Replica) -> bool:
        """Whether trajectories that are to come back to it from the environment come back to a busier rollout of its version
        instead, so that it can take newer weights now: a repack (`repack.enabled`) that nobody has to be stopped for.
        """
        if not self._repacks or replica.in_flight or replica.relay.stored_version <= replica.policy_version:
            return False
        moved = self.pool.in_environment(replica.name)
        targets = [
            other
            for other in self.replicas.values()
            if other is not replica
            and other.policy_version == replica.policy_version
            and 0 < len(other.in_flight) <= self._max_running - len(moved)
            and other.stopping_for is None
            and self.fleet.takes_work(other)
        ]
        if not targets:
            return False
        target = max(targets, key=lambda other: len(other.in_flight))
        for trajectory in moved:
            self.pool.rehome(trajectory, target.name)
        self._events.emit(
            RolloutsRepacked(
                source=replica.name,
                target=target.name,
                trajectories=len(moved),
                tokens=sum(len(t.prompt.token_ids) + t.num_tokens for t in moved),
                seconds=0.0,
            )
        )
        return True

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
        self.fleet.pulled(replica, version)
        if self.schedule.synchronizes and self.fleet.all_serve(version):
            self.fleet.wake_all()

    def assignments(self, replica: Replica) -> tuple[messages.TrajectoryAssignment, ...]:
        """What this rollout should generate next, leased to it: what waits for it, held-out prompts, then new groups."""
        if not self.fleet.takes_work(replica):
            return ()
        room = self._max_running - len(replica.in_flight)
        waiting = self.pool.take_waiting(replica.name, replica.policy_version, room)
        leased = [self._lease(trajectory, replica) for trajectory in waiting]
        for trajectory in waiting:
            self._events.emit(TrajectoryMoved(trajectory=trajectory, rollout=replica.name))
        leased += self._evaluation(replica)
        share = self._share(replica) if self._may_start(replica) else 0
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

    def _evaluation(self, replica: Replica) -> list[messages.TrajectoryAssignment]:
        """Trajectories of an evaluation, leased to this rollout; none while it is to drain for what is trained."""
        if (
            self.evaluator.running is None
            or replica.receiving
            or (self.pool.orphans and self._version_to_rescue(replica) is not None)
        ):
            return []
        together = not self.schedule.synchronizes or self.fleet.all_serve(replica.policy_version)
        room = self._max_running - len(replica.in_flight)
        leased = []
        for trajectory in self.evaluator.take(replica, room, may_begin=together):
            begun = bool(trajectory.versions)
            leased.append(self._lease(trajectory, replica))
            moved = TrajectoryMoved(trajectory=trajectory, rollout=replica.name)
            self._events.emit(moved if begun else TrajectoryStarted(trajectory=trajectory))
        return leased

    def _max_tokens(self, trajectory: Trajectory) -> int:
        """Of its response."""
        return self._max_response_tokens if trajectory.evaluation is None else self._max_evaluation_tokens

    def _share(self, replica: Replica) -> int:
        """Trajectories that each rollout would have if all that may start now were spread evenly over all.

        A rollout starts groups while it has fewer: otherwise the first to come would take all that the schedule admits.
        """
        total = self.pool.held + self._room(replica.policy_version) * self._group_size
        return min(self._max_running, -(-total // self.fleet.at_work))

    def rollouts_wanted(self) -> int:
        """Rollouts that could fill up with groups that may start, beyond what those that are there take by themselves.

        An emptied rollout takes the newest weights, and its share; those that serve them, or are empty, take theirs anyway.
        """
        if self.control.generation_paused or self.control.stop_requested.is_set() or not len(self.prompts):
            return 0
        published = self.relays.published_version
        may_start = self._room(published) * self._group_size
        if may_start <= 0:
            return 0
        held = self.pool.held + may_start
        share = max(self._group_size, min(self._max_running, -(-held // max(1, self.fleet.at_work))))
        for replica in self.replicas.values():
            fills_by_itself = replica.policy_version >= published or not replica.in_flight
            if fills_by_itself and self.fleet.takes_work(replica):
                may_start -= max(0, share - len(replica.in_flight))
        return max(0, -(-may_start // share))

    def room_on(self, replica: Replica) -> int:
        """Trajectories that a rollout could take in beyond those that it has, and those that wait for it."""
        return self._max_running - len(replica.in_flight) - len(self.pool.destined(replica.name))

    def release_what_has_no_room(self, replica: Replica) -> None:
        """Several rollouts were emptied into this one, and it cannot hold all: any other of their version may go on with the rest."""
        if (excess := -self.room_on(replica)) > 0:
            for trajectory in self.pool.destined(replica.name)[-excess:]:
                self.fleet.orphan(trajectory)

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
            # A host of an evaluation stays behind: what it starts is older, but within the bound that `_room` keeps.
            and (replica.policy_version >= replica.relay.stored_version or self.evaluator.claim(replica))
            and (not self.schedule.synchronizes or self.fleet.all_serve(replica.policy_version))
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
            max_new_tokens=self._max_tokens(trajectory) - trajectory.num_tokens,
            seed=self._seed_of(trajectory),
            kv=self.kv_exports.of(trajectory, replica.policy_version),
            temperature=None if trajectory.evaluation is None else self._evaluation_temperature,
        )

    def _seed_of(self, trajectory: Trajectory) -> int:
        """The same trajectory gets the same seed in every run of a config; another for each turn, or all would draw alike."""
        turn = f"/{len(trajectory.turns)}" if trajectory.turns else ""
        return zlib.crc32(f"{self._seed}/{trajectory.trajectory_id}{turn}".encode()) >> 1

    # ------------------------------------------------------------ orphans

    def _settle_orphans(self) -> None:
        """Start those anew whose version no rollout serves and none can pull."""
        if not self._regenerate or self.schedule.interrupts:
            return
        at_hand = {replica.policy_version for replica in self.fleet.replicas.values()} | {self.relays.published_version}
        for relay in self.fleet.relay_of.values():
            at_hand.update(relay.versions)
        for trajectory in list(self.pool.orphans.values()):
            if trajectory.versions and trajectory.policy_version not in at_hand:
                lost = self.pool.start_over(trajectory)
                self.kv_exports.over(trajectory.trajectory_id)
                self._events.emit(TrajectoryRestarted(trajectory=trajectory, lost_tokens=lost))

    def _version_to_rescue(self, replica: Replica) -> int | None:
        """A version that orphans need, nobody serves, and this rollout's relay holds; one rollout takes it."""
        served = {other.policy_version for other in self.fleet.replicas.values()}
        for trajectory in self.pool.orphans.values():
            version = trajectory.policy_version
            if version is None or not trajectory.versions or version in served or not replica.relay.holds(version):
                continue
            rescuer = self.fleet.replicas.get(self._rescuers.get(version, ""))
            if rescuer is None or not rescuer.relay.holds(version):
                self._rescuers[version] = replica.name
                return version
            if rescuer is replica:
                return version
        return None

    # ------------------------------------------------------------ taking in

    def _on_load(self, worker: Worker, message: messages.RolloutLoad) -> None:
        replica = self.replicas.get(worker.name)
        if replica is None:
            return
        if message.steps is None:
            replica.load = message  # the last figures of a rollout that has drained
        else:
            replica.observe(message)
            self.on_observed(replica)

    def _on_kv_taken(self, worker: Worker, message: messages.KvTaken) -> None:
        self.kv_exports.taken(message)
        if message.error:
            text = f"{worker.name} prefilled trajectory {message.trajectory_id}, its KV was not taken: {message.error}"
            self._events.emit(Notice(level="warning", text=text))
        self._events.emit(
            KvMoved(
                rollout=worker.name,
                trajectory_id=message.trajectory_id,
                tokens=message.tokens,
                nbytes=message.nbytes,
                seconds=message.seconds,
                error=message.error,
            )
        )

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
        if message.exported_kv:
            self.kv_exports.take_in(message.exported_kv, ended, replica.host)
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
        """A rollout is through with a trajectory: it has finished, has ended a turn, or was stopped to go on elsewhere."""
        if trajectory.state is TrajectoryState.GENERATING:
            if trajectory.num_tokens < self._max_tokens(trajectory):
                target = replica.stopping_for
                if target in self.replicas and not self.replicas[target].leaving:
                    self.pool.destine(trajectory, target)
                else:
                    self.fleet.orphan(trajectory)
                return
            self.pool.finish(trajectory, "length", self._now())
        self.kv_exports.over(trajectory.trajectory_id)
        if trajectory.state is TrajectoryState.ENVIRONMENT:
            if replica.leaving:
                self.pool.rehome(trajectory, "")
            elif replica.stopping_for in self.replicas:
                self.pool.rehome(trajectory, replica.stopping_for)
            self._events.emit(TurnEnded(trajectory=trajectory))
        else:
            self._events.emit(TrajectoryFinished(trajectory=trajectory))

    def _withdraw(self, group: Group) -> None:
        """A group was dropped: stop its members that are still generated."""
        for trajectory in group.trajectories:
            if self.pool.get(trajectory.trajectory_id) is None:
                continue
            self.pool.withdraw(trajectory)
            self.kv_exports.over(trajectory.trajectory_id)
            replica = self.replicas.get(trajectory.rollout or "")
            if replica is not None:
                if replica.in_flight.pop(trajectory.trajectory_id, None) is not None:
                    replica.to_abort.append(trajectory.trajectory_id)
                replica.wake.set()
        self._wake_if_drained()

    def _wake_if_drained(self) -> None:
        """Under a schedule that synchronizes, the last to drain lets all others go on."""
        if self.schedule.synchronizes and not self.pool.held:
            self.fleet.wake_all()

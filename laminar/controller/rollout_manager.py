"""One coroutine per rollout: fill it, let it drain once newer weights are there, let it pull, fill it again.

  experience buffer --may_admit--> [ driver of rollout k ] --Generate-----> rollout k
  prompt pool ------take---------> [                     ] --PullWeights--> rollout k
  relay manager ----on_stored----> [                     ] <-TrajectoryDeltas, WeightsPulled--

Each driver looks at its own rollout only; nothing here waits for all of them. Invariants: a rollout is given work only
while it serves the newest version that its relay holds; it pulls only when it has drained.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field

import numpy as np

from laminar.config.schema import ExperimentConfig
from laminar.controller.experience_buffer import ExperienceBuffer
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.prompt_pool import PromptPool
from laminar.controller.relay_manager import Relay, RelayManager, store_name
from laminar.controller.run_control import RunControl
from laminar.controller.schedules.schedule import Schedule
from laminar.controller.state_clock import StateClock
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed
from laminar.observability.events import EventBus, TokensAppended, TrajectoryFinished, TrajectoryStarted, WeightsPulled
from laminar.protocol import messages
from laminar.trajectory import Group, Prompt, Trajectory

NO_LOAD = messages.RolloutLoad(running=0, waiting=0, kv_utilization=0.0)


@dataclass(kw_only=True, slots=True)
class Replica:
    """One rollout as the controller sees it."""

    name: str
    relay: Relay
    clock: StateClock
    policy_version: int = -1
    in_flight: set[str] = field(default_factory=set)
    load: messages.RolloutLoad = NO_LOAD
    generated_tokens: int = 0
    last_token_at: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class RolloutManager:
    """Assignment of prompts to rollouts and what comes back."""

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
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self._registry = registry
        self._events = events
        self._relays = relays
        self._prompts = prompts
        self._pool = pool
        self._buffer = buffer
        self._schedule = schedule
        self._control = control
        self._group_size = config.trainer.group_size
        self._max_running = config.rollout.max_running
        self._max_response_tokens = config.rollout.max_response_tokens
        self._limit_s = config.controller.step_timeout_s
        self._seed = config.seed
        self._next_group = 0
        registry.handle(messages.TrajectoryDeltas, self._on_deltas)
        registry.handle(messages.RolloutLoad, self._on_load)

    def add(self, worker: Worker) -> Replica:
        """Take a ready rollout in; its driver is started with `drive`."""
        now = asyncio.get_running_loop().time
        replica = Replica(
            name=worker.name,
            relay=self._relays.relay_for(worker),
            clock=StateClock("weights", now),
            last_token_at=now(),
        )
        self.replicas[replica.name] = replica
        return replica

    def wake_all(self) -> None:
        """Something changed that may let a rollout go on."""
        for replica in self.replicas.values():
            replica.wake.set()

    async def drive(self, replica: Replica) -> None:
        """The life of one rollout; ends only by cancellation.

        Raises:
            RunFailed: the rollout has trajectories and has sent nothing for the limit, or does not answer a pull.
        """
        loop = asyncio.get_running_loop()
        while True:
            replica.wake.clear()
            newest = replica.relay.stored_version
            if newest > replica.policy_version:
                if not replica.in_flight:
                    await self._pull(replica, newest)
                    continue
            elif newest >= 0:
                await self._fill(replica)
            replica.clock.enter(self._waits_for(replica))
            try:
                async with asyncio.timeout(self._limit_s):
                    await replica.wake.wait()
            except TimeoutError:
                silent = loop.time() - replica.last_token_at
                if replica.in_flight and silent >= self._limit_s:
                    raise RunFailed(
                        f"{replica.name} has {len(replica.in_flight)} trajectories and has sent no token for "
                        f"{silent:.0f} s (controller.step_timeout_s)"
                    ) from None

    def _waits_for(self, replica: Replica) -> str:
        if replica.in_flight:
            return "generating"
        if self._control.generation_paused:
            return "paused"
        if replica.relay.stored_version < self._relays.published_version or replica.policy_version < 0:
            return "weights"
        if not len(self._prompts):
            return "prompts"
        return "admission"  # max_staleness: the trainer has to consume first

    async def _pull(self, replica: Replica, version: int) -> None:
        replica.clock.enter("pulling")
        message = messages.PullWeights(policy_version=version, store=store_name(replica.relay.rank))
        answer = await self._registry.ask(replica.name, message, messages.WeightsPulled, self._limit_s)
        if answer.policy_version < version:
            raise RunFailed(f"{replica.name} pulled version {answer.policy_version}, {version} was there")
        replica.policy_version = answer.policy_version
        self._events.emit(
            WeightsPulled(rollout=replica.name, policy_version=answer.policy_version, seconds=answer.seconds)
        )

    async def _fill(self, replica: Replica) -> None:
        assignments: list[messages.TrajectoryAssignment] = []
        while self._may_start(replica):
            prompt = self._prompts.take()
            if prompt is None:
                break
            group = self._new_group(prompt, replica.policy_version)
            self._buffer.admit(group)
            assignments += [self._lease(trajectory, replica) for trajectory in group.trajectories]
        if assignments:
            replica.clock.enter("generating")
            await self._registry.send(replica.name, messages.Generate(assignments=tuple(assignments)))

    def _may_start(self, replica: Replica) -> bool:
        return (
            not self._control.generation_paused
            and not self._control.stop_requested.is_set()
            and len(replica.in_flight) + self._group_size <= self._max_running
            and self._schedule.may_admit(serving_version=replica.policy_version, admitted=self._buffer.admitted)
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
        now = asyncio.get_running_loop().time()
        self._pool.lease(trajectory, rollout=replica.name, policy_version=replica.policy_version, now=now)
        if not replica.in_flight:
            replica.last_token_at = now
        replica.in_flight.add(trajectory.trajectory_id)
        self._events.emit(TrajectoryStarted(trajectory=trajectory))
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

    def _on_load(self, worker: Worker, message: messages.RolloutLoad) -> None:
        if replica := self.replicas.get(worker.name):
            replica.load = message

    def _on_deltas(self, worker: Worker, message: messages.TrajectoryDeltas) -> None:
        replica = self.replicas[worker.name]
        replica.load = message.load
        now = asyncio.get_running_loop().time()
        late_before = self._pool.late_tokens
        offsets = np.concatenate([[0], np.cumsum(message.token_counts)])
        for k, trajectory_id in enumerate(message.trajectory_ids):
            span = slice(int(offsets[k]), int(offsets[k + 1]))
            finished = self._pool.take_in(
                trajectory_id,
                lease=message.leases[k],
                policy_version=message.policy_version,
                token_ids=message.token_ids[span],
                logprobs=message.logprobs[span],
                finish_reason=message.finish_reasons[k],
                now=now,
            )
            if finished is not None:
                replica.in_flight.discard(trajectory_id)
                self._events.emit(TrajectoryFinished(trajectory=finished))
        late = self._pool.late_tokens - late_before
        tokens = int(offsets[-1]) - late
        replica.generated_tokens += tokens
        replica.last_token_at = now
        if not replica.in_flight:
            replica.clock.enter(self._waits_for(replica))
        replica.wake.set()
        self._events.emit(
            TokensAppended(
                rollout=replica.name, tokens=tokens, late_tokens=late, kv_utilization=message.load.kv_utilization
            )
        )

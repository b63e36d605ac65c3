"""Drives the trainer: take a batch, train, hear that the new weights are published, go on.

  experience buffer --take_batch--> [ trainer driver ] --TrainStep--> every rank
  relay manager <---published------ [                ] <--StepTrained (all ranks), WeightsPublished (rank 0)

The only waits are for a batch, for the ranks, and for a checkpoint; never for a broadcast or a rollout.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from laminar.config.schema import ExperimentConfig
from laminar.controller.experience_buffer import ExperienceBuffer
from laminar.controller.relay_manager import RelayManager
from laminar.controller.run_control import RunControl
from laminar.controller.schedules.schedule import Schedule
from laminar.controller.state_clock import StateClock
from laminar.controller.waiting import within
from laminar.controller.worker_registry import WorkerRegistry
from laminar.errors import RunFailed
from laminar.observability.events import (
    CheckpointFinished,
    EventBus,
    GroupDropped,
    Notice,
    StepFinished,
    StepStarted,
    WeightsPublished,
)
from laminar.protocol import messages
from laminar.trajectory import Group


class TrainerDriver:
    """One coroutine, `run`, that makes all steps of the run."""

    def __init__(
        self,
        registry: WorkerRegistry,
        events: EventBus,
        buffer: ExperienceBuffer,
        relays: RelayManager,
        schedule: Schedule,
        control: RunControl,
        config: ExperimentConfig,
        *,
        checkpoint_dir: Path,
        data_ended: Callable[[], bool],
        describe_wait: Callable[[], str],
    ) -> None:
        self.step = 0
        self.policy_version = -1
        self.clock = StateClock("starting", asyncio.get_running_loop().time)
        self.last_checkpoint: str | None = None
        self.failed_checkpoint: str | None = None
        self._registry = registry
        self._events = events
        self._buffer = buffer
        self._relays = relays
        self._schedule = schedule
        self._control = control
        self._steps = config.trainer.steps
        self._groups_per_step = config.trainer.groups_per_step
        self._train_last_batch = config.data.last_batch == "train"
        self._checkpoint_every = config.trainer.checkpoint_every
        self._checkpoint_dir = checkpoint_dir
        self._limit_s = config.controller.step_timeout_s
        self._data_ended = data_ended
        self._describe_wait = describe_wait
        control.on_change.append(buffer.changed.set)

    async def run(self) -> None:
        """Publish version 0, make the steps, write the final checkpoint.

        Raises:
            RunFailed: a rank or a batch did not come within the limit, or the final checkpoint could not be written.
        """
        await self._publish_initial()
        while self.step < self._steps:
            groups = await self._next_batch()
            if not groups:
                break
            await self._train(groups)
            if self._checkpoint_every and self.step % self._checkpoint_every == 0 and self.step < self._steps:
                await self._checkpoint()
        await self._checkpoint()
        self.clock.enter("done")
        if self.failed_checkpoint:
            raise RunFailed(f"the final checkpoint could not be written: {self.failed_checkpoint}")

    async def _publish_initial(self) -> None:
        self.clock.enter("publishing")
        for rank in self._registry.names("trainer"):
            if rank != "trainer-0":
                await self._registry.send(rank, messages.PublishWeights(policy_version=0))
        answer = await self._registry.ask(
            "trainer-0", messages.PublishWeights(policy_version=0), messages.WeightsPublished, self._limit_s
        )
        self._published(answer)

    def _published(self, answer: messages.WeightsPublished) -> None:
        self.policy_version = answer.policy_version
        self._relays.published(answer.policy_version)
        self._events.emit(
            WeightsPublished(
                policy_version=answer.policy_version, publish_stall_s=answer.publish_stall_s, nbytes=answer.nbytes
            )
        )

    async def _next_batch(self) -> list[Group] | None:
        """The next batch; None when the run should end."""
        loop = asyncio.get_running_loop()
        waiting_since = loop.time()
        while not self._control.stop_requested.is_set():
            if not self._control.training_allowed.is_set():
                self.clock.enter("paused")
            else:
                self._buffer.changed.clear()
                no_more = self._data_ended()
                groups = self._buffer.take_batch(
                    self._schedule, published_version=self.policy_version, no_more_groups=no_more
                )
                if groups:
                    if len(groups) < self._groups_per_step and not self._train_last_batch:
                        self._leave(groups)
                        return None
                    return groups
                if no_more and not any(True for _ in self._buffer):
                    self._events.emit(Notice(level="info", text="the data has ended, and with it the run"))
                    return None
                self.clock.enter("trajectories")
            # A pause lasts as long as the person wants; a batch has to come.
            paused = not self._control.training_allowed.is_set() or self._control.generation_paused
            try:
                async with asyncio.timeout(None if paused else self._limit_s):
                    await self._buffer.changed.wait()
            except TimeoutError:
                raise RunFailed(
                    f"waited {loop.time() - waiting_since:.0f} s for the batch of step {self.step + 1} "
                    f"(controller.step_timeout_s): {self._describe_wait()}"
                ) from None
            self._buffer.changed.clear()
        return None

    def _leave(self, groups: list[Group]) -> None:
        reason = f"the data ended {self._groups_per_step - len(groups)} groups short of a step (data.last_batch: drop)"
        for group in groups:
            self._events.emit(GroupDropped(group=group, reason=reason))
        self._events.emit(Notice(level="info", text=f"left {len(groups)} groups: {reason}"))

    async def _train(self, groups: list[Group]) -> None:
        step, version = self.step + 1, self.policy_version + 1
        self.clock.enter("training")
        self._events.emit(StepStarted(step=step, groups=len(groups)))
        message = train_step_message(groups, step=step, publish_version=version)
        ranks = self._registry.names("trainer")
        published = self._registry.expect("trainer-0", messages.WeightsPublished)
        answers = await asyncio.gather(
            *(self._registry.ask(rank, message, messages.StepTrained, self._limit_s) for rank in ranks)
        )
        self.clock.enter("publishing")
        self._published(await within(self._limit_s, f"trainer-0 to publish version {version}", published))
        self.step = step
        self._buffer.consume(groups, step)
        self._events.emit(
            StepFinished(
                step=step,
                policy_version=version,
                groups=groups,
                train_s=answers[0].seconds,
                trainer_metrics=answers[0].metrics,
            )
        )

    async def _checkpoint(self) -> None:
        """Write a checkpoint of the current step; a failure is told, and the run goes on."""
        path = self._checkpoint_dir / f"step-{self.step:06d}"
        if self.last_checkpoint == str(path):
            return
        self.clock.enter("checkpointing")
        message = messages.SaveCheckpoint(
            step=self.step,
            policy_version=self.policy_version,
            path=str(path),
            state=json.dumps({"step": self.step, "policy_version": self.policy_version}),
        )
        ranks = self._registry.names("trainer")
        answers = await asyncio.gather(
            *(self._registry.ask(rank, message, messages.CheckpointSaved, self._limit_s) for rank in ranks)
        )
        error = next((answer.error for answer in answers if answer.error), "")
        self.failed_checkpoint = error or None
        if error:
            self._events.emit(Notice(level="warning", text=f"checkpoint of step {self.step} failed: {error}"))
        else:
            self.last_checkpoint = str(path)
        self._events.emit(
            CheckpointFinished(
                step=self.step,
                path=str(path),
                seconds=max(answer.seconds for answer in answers),
                nbytes=sum(answer.nbytes for answer in answers),
                error=error,
            )
        )


def train_step_message(groups: list[Group], *, step: int, publish_version: int) -> messages.TrainStep:
    """The batch as flat arrays; trajectories of a group stand together, in the order of `groups`."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    prompts = [trajectory.prompt.token_ids for trajectory in trajectories]
    responses = [trajectory.response_token_ids() for trajectory in trajectories]
    versions = [trajectory.policy_version for trajectory in trajectories]
    return messages.TrainStep(
        step=step,
        publish_version=publish_version,
        group_ids=np.array([trajectory.group_id for trajectory in trajectories], np.int64),
        rewards=np.array([trajectory.reward for trajectory in trajectories], np.float32),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        response_lengths=np.array([len(response) for response in responses], np.int32),
        token_ids=np.concatenate([piece for pair in zip(prompts, responses, strict=True) for piece in pair]),
        loss_mask=np.ones(sum(len(response) for response in responses), np.uint8),
        engine_logprobs=np.concatenate([trajectory.response_logprobs() for trajectory in trajectories]),
        staleness=np.array([publish_version - 1 - (version or 0) for version in versions], np.int32),
    )

"""Drives the trainer: take a batch, train, hear that the new weights are published, go on.

  experience buffer --take_batch--> [ trainer driver ] --TrainStep--> every rank
  relay manager <---published------ [                ] <--StepTrained (all ranks), WeightsPublished (rank 0)

The only waits are for a batch, for the ranks, and for a checkpoint; never for a broadcast or a rollout. When a rank is
lost, all of them start anew from the newest complete checkpoint, and the groups of the lost steps go back to the buffer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.controller.batch_arrays import BatchArrays
from laminar.controller.checkpoints import Checkpoints
from laminar.controller.experience_buffer import ExperienceBuffer
from laminar.controller.journal.journal import Journal, NoJournal
from laminar.controller.journal.restore import Restored
from laminar.controller.relay_manager import RelayManager
from laminar.controller.run_control import RunControl
from laminar.controller.schedules.schedule import Schedule
from laminar.controller.state_clock import StateClock
from laminar.controller.trainer_orders import TrainerOrders
from laminar.controller.waiting import discard, within
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import (
    EventBus,
    Notice,
    StepFinished,
    StepStarted,
    TrainerRestarted,
    WeightsPublished,
)
from laminar.protocol import messages
from laminar.trajectory import Group

LEADER = "trainer-0"  # the rank that publishes


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
        checkpoints: Checkpoints,
        config: ExperimentConfig,
        *,
        data_ended: Callable[[], bool],
        describe_wait: Callable[[], str],
        draw_again: Callable[[list[Group]], None],
        restart: Callable[[str, str], Awaitable[None]],
        journal: Journal | NoJournal,
        restored: Restored | None,
        patience_s: Callable[[str], float],
    ) -> None:
        """
        Args:
            draw_again: takes groups that are to be trained (again), and of which nothing but the prompt is left.
            restart: `restart("trainer", reason)` starts all ranks anew, or raises WorkerLost if it cannot.
            restored: where an earlier controller of this run has left the trainer.
            patience_s: how long that trainer may take to come back.
        """
        self.step = 0 if restored is None else restored.step
        self.policy_version = -1 if restored is None else restored.policy_version
        self.clock = StateClock("starting", asyncio.get_running_loop().time)
        self.checkpoints = checkpoints
        self._registry = registry
        self._events = events
        self._buffer = buffer
        self._relays = relays
        self._schedule = schedule
        self._control = control
        self._steps = config.trainer.steps
        self._train_last_batch = config.data.last_batch == "train"
        self._mini_batches = config.trainer.mini_batches
        self._checkpoint_every = config.trainer.checkpoint_every
        self._drop_stale = config.schedule.on_stale == "drop"
        self._limit_s = config.controller.step_timeout_s
        self._start_limit_s = config.controller.start_timeout_s
        self._ranks = [f"trainer-{rank}" for rank in range(config.trainer.ranks)]
        self._data_ended = data_ended
        self._describe_wait = describe_wait
        self._draw_again = draw_again
        self._restart = restart
        self._publishing: asyncio.Future[messages.WeightsPublished] | None = None
        self._orders = TrainerOrders(registry, journal, restored)
        self._to_take_up = restored is not None  # it has had a controller before
        self._patience_s = patience_s
        self._lost = ""  # why a rank is gone
        self._to_start_anew = False
        self._restarts = 0  # since the last step
        self._max_restarts = config.trainer.restarts
        self._steps_lost = 0
        self._batch_arrays = BatchArrays()
        # The parts so far of the step that is being made; per step since the checkpoint, what it consumed.
        self._in_training: list[Group] = [] if restored is None else list(restored.in_training)
        self._since_checkpoint: list[list[Group]] = [] if restored is None else list(restored.since_checkpoint)
        self._parts_made = 0 if restored is None else restored.parts_made  # of that step, by an earlier controller
        control.on_change.append(buffer.changed.set)
        registry.on_lost("trainer", self._on_lost)

    async def run(self) -> None:
        """Publish version 0, make the steps, write the final checkpoint.

        Raises:
            RunFailed: a rank or a batch did not come within the limit, or the final checkpoint could not be written.
            WorkerLost: a rank was lost, and there is no checkpoint to go back to.
        """
        done = False
        while not done:
            try:
                if self._to_take_up:
                    await self._take_up()
                if self._to_start_anew:
                    await self._start_anew(self._lost)
                done = await self._go_on()
            except WorkerLost as error:
                self._note_loss(str(error))
        self.clock.enter("done")
        if self.checkpoints.failed:
            raise RunFailed(f"the final checkpoint could not be written: {self.checkpoints.failed}")

    async def _go_on(self) -> bool:
        """All that is left to do; true when the run is to end."""
        unanswered = self._orders.unanswered
        if unanswered is not None and unanswered.kind == "publish":
            await self._publish(unanswered.policy_version or 0)
            if self._drop_stale:  # the ranks may have been started anew just before
                self._buffer.drop_stale(self._schedule, self.policy_version)
        elif unanswered is not None and unanswered.kind == "save":
            await self._checkpoint()
        if self.policy_version < 0:
            await self._publish(0)
        while self.step < self._steps and await self._make_step():
            if self._checkpoint_every and self.step % self._checkpoint_every == 0 and self.step < self._steps:
                await self._checkpoint()
        await self._checkpoint()
        return True

    async def _publish(self, version: int) -> None:
        """The current weights, as this version."""
        self.clock.enter("publishing")
        order = await self._orders.publish(self.step, version)
        message = messages.PublishWeights(order=order.number, policy_version=version)
        for rank in self._ranks[1:]:
            await self._registry.send(rank, message)
        published = self._expect_publish(version)
        try:
            await self._registry.send(LEADER, message)
            await self._wait_for_publish(published, version)
            self._orders.answered(order)
        finally:
            discard(published)

    def _expect_publish(self, version: int | None) -> asyncio.Future[messages.WeightsPublished]:
        """The leader's word that it has published; failed when any rank is lost, for then it may never come."""
        self._publishing = self._registry.expect(
            LEADER, messages.WeightsPublished, lambda published: published.policy_version == version
        )
        return self._publishing

    async def _wait_for_publish(self, published: asyncio.Future[messages.WeightsPublished], version: int) -> None:
        self.clock.enter("publishing")
        self._published(await within(self._limit_s, f"{LEADER} to publish version {version}", published))

    def _published(self, answer: messages.WeightsPublished) -> None:
        self.policy_version = answer.policy_version
        self._relays.published(answer.policy_version)
        self._events.emit(
            WeightsPublished(
                policy_version=answer.policy_version, publish_stall_s=answer.publish_stall_s, nbytes=answer.nbytes
            )
        )
        self._buffer.evict(answer.policy_version)

    # ------------------------------------------------------------ a step

    async def _make_step(self) -> bool:
        """Train one step on the parts that its schedule selects; false when the run should end."""
        step = self.step + 1
        metrics: Counter[str] = Counter()
        train_s, first = 0.0, self._parts_made
        parts, self._parts_made = first, 0
        while parts < self._schedule.parts:
            last = parts == self._schedule.parts - 1
            groups, version = self._unanswered_batch(step, parts)
            if not groups:
                groups = await self._next_batch(parts) or []
                version = self._orders.issued + 1 if last else None
                self._in_training += groups
            if not groups:
                break
            answer = await self._train(groups, step=step, part=parts, publish_version=version)
            train_s += answer.seconds
            metrics.update(answer.metrics)
            parts += 1
        if not parts:
            return False
        short = parts < self._schedule.parts
        if short:  # the data ended within the step, the run is to end, or the newest version was lost
            await self._publish(self._orders.issued + 1)
        made = max(1, parts - first)
        self._finish_step(step, train_s, {name: value / made for name, value in metrics.items()})
        if short and self._drop_stale and not self._control.stop_requested.is_set():
            self._buffer.drop_stale(self._schedule, self.policy_version)
        return True

    def _unanswered_batch(self, step: int, part: int) -> tuple[list[Group], int | None]:
        """What an earlier controller has had trained as this part, and may not have heard of; and the version."""
        order = self._orders.unanswered
        if order is None or (order.kind, order.step, order.part) != ("train", step, part):
            return [], None
        by_id = {group.group_id: group for group in self._in_training}
        return [by_id[group_id] for group_id in order.group_ids], order.policy_version

    def _finish_step(self, step: int, train_s: float, metrics: dict[str, float]) -> None:
        groups, self._in_training = self._in_training, []
        self._restarts = 0
        self.step = step
        self._buffer.steps_left = self._steps - step
        self._buffer.consume(groups, step)
        if self._checkpoint_every:
            self._since_checkpoint.append(groups)
        self._events.emit(
            StepFinished(
                step=step,
                policy_version=self.policy_version,
                groups=groups,
                train_s=train_s,
                trainer_metrics=metrics,
            )
        )

    async def _next_batch(self, part: int) -> list[Group] | None:
        """The next groups to train; None when the run should end."""
        now = asyncio.get_running_loop().time
        waiting_since, resampled = now(), self._buffer.resampled
        while not self._control.stop_requested.is_set():
            if self._lost:
                raise WorkerLost(self._lost)
            self._buffer.changed.clear()
            if self._relays.must_publish_again:
                if part:  # the weights are no longer those of that version: the step ends with the parts that it has
                    return None
                text = f"version {self.policy_version} is lost, the trainer publishes it again"
                self._events.emit(Notice(level="warning", text=text))
                await self._publish(self.policy_version)
            if not self._control.training_allowed.is_set():
                self.clock.enter("paused")
            else:
                no_more = self._data_ended()
                groups = self._buffer.take_batch(
                    self._schedule, published_version=self.policy_version, part=part, no_more_groups=no_more
                )
                if groups:
                    if len(groups) < self._schedule.batch_groups and not self._train_last_batch:
                        self._leave(groups)
                        return None
                    return groups
                if no_more and not self._buffer.outstanding:
                    self._events.emit(Notice(level="info", text="the data has ended, and with it the run"))
                    return None
                self.clock.enter("trajectories")
            if resampled != self._buffer.resampled:  # groups came, and are generated anew, so often and no more
                waiting_since, resampled = now(), self._buffer.resampled
            if not self._control.training_allowed.is_set() or self._control.generation_paused:
                await self._buffer.changed.wait()  # a pause lasts as long as the person wants
                waiting_since = now()
                continue
            try:
                async with asyncio.timeout_at(waiting_since + self._limit_s):
                    await self._buffer.changed.wait()
            except TimeoutError:
                raise RunFailed(
                    f"waited {now() - waiting_since:.0f} s for the batch of step {self.step + 1} "
                    f"(controller.step_timeout_s): {self._describe_wait()}"
                ) from None
        return None

    def _leave(self, groups: list[Group]) -> None:
        short = self._schedule.batch_groups - len(groups)
        reason = f"the data ended {short} groups short of a step (data.last_batch: drop)"
        self._buffer.leave(groups, reason)
        self._events.emit(Notice(level="info", text=f"left {len(groups)} groups: {reason}"))

    async def _train(
        self, groups: list[Group], *, step: int, part: int, publish_version: int | None
    ) -> messages.StepTrained:
        self.clock.enter("training")
        self._events.emit(StepStarted(step=step, groups=len(groups)))
        order = await self._orders.train(step, part, publish_version, groups)
        message = self._batch_arrays.message(
            groups,
            order=order.number,
            step=step,
            part=part,
            mini_batches=self._mini_batches // self._schedule.parts,
            publish_version=publish_version,
        )
        published = self._expect_publish(publish_version)

        def answers_this(trained: Any) -> bool:
            return bool(trained.step == step and trained.part == part)

        try:
            answers = await self._registry.ask_all(
                self._ranks, message, messages.StepTrained, self._limit_s, answers_this
            )
            if publish_version is not None:
                await self._wait_for_publish(published, publish_version)
            self._orders.answered(order)
        finally:
            discard(published)
        trained: messages.StepTrained = answers[0]
        return trained

    async def _checkpoint(self) -> None:
        """Write a checkpoint of the current step; a failure is told, and the run goes on."""
        self.clock.enter("checkpointing")
        if await self.checkpoints.save(self._orders, self._ranks, step=self.step, policy_version=self.policy_version):
            self._since_checkpoint.clear()

    # ------------------------------------------------------------ taking another controller's place

    async def _take_up(self) -> None:
        """Go on with the ranks that an earlier controller drove, or with fresh ones from the newest checkpoint."""
        self.clock.enter("restarting")
        try:
            await self._registry.wait_until_ready(self._patience_s(LEADER), self._ranks)
        except RunFailed as error:
            self._to_take_up = False
            missing = next((rank for rank in self._ranks if self._registry.missing([rank])), LEADER)
            raise WorkerLost(f"{missing} was lost: it has not come back to the new controller ({error})") from error
        self._to_take_up = False
        match self._orders.stand(self._ranks):
            case "as expected":
                if self.policy_version >= 0:
                    self._relays.trainer_holds(self.policy_version)
            case "fresh":
                await self._begin_again("the controller was started with a new trainer")
            case "unknown":
                raise WorkerLost("the trainer does not stand where the journal says")

    # ------------------------------------------------------------ losing the trainer

    def _on_lost(self, worker: Worker, reason: str) -> None:
        """Whoever waits for a rank is told by the registry; the driver starts all of them anew.

        Raises:
            WorkerLost: there are no checkpoints to go back to, or the run has not begun.
        """
        if worker.name == LEADER:
            self._relays.trainer_lost()
        text = f"{worker.name} was lost: {reason}"
        if not self._can_start_anew():
            raise WorkerLost(text)
        self._lost = self._lost or text
        if self._publishing is not None and not self._publishing.done():
            self._publishing.set_exception(WorkerLost(text))
        self._buffer.changed.set()

    def _can_start_anew(self) -> bool:
        return self._checkpoint_every > 0 and self.policy_version >= 0

    def _note_loss(self, reason: str) -> None:
        """A rank is gone: start all of them anew, unless that has been tried too often.

        Raises:
            WorkerLost: there are no checkpoints to go back to.
            RunFailed: `trainer.restarts` times in a row no step could be made.
        """
        self._lost = self._lost or reason
        if not self._can_start_anew():
            raise WorkerLost(self._lost)
        if self._restarts == self._max_restarts:
            raise RunFailed(f"the trainer was started anew {self._restarts} times (trainer.restarts): {self._lost}")
        self._restarts += 1
        self._to_start_anew = True

    async def _start_anew(self, reason: str) -> None:
        """All ranks from the newest complete checkpoint; may be cut short by another loss, and is then made again."""
        self.clock.enter("restarting")
        self._events.emit(Notice(level="warning", text=f"starting the trainer anew: {reason}"))
        self._go_back_to(self._newest_step)
        for rank in self._ranks:  # the others wait in a collective for the lost one
            self._registry.lost(rank, "the trainer is started anew")
        self._lost = ""
        self._orders.forget_joined()
        await self._restart("trainer", reason)
        try:
            await self._registry.wait_until_ready(self._start_limit_s, self._ranks)
        except RunFailed as error:
            raise WorkerLost(str(error)) from error  # it may come at the next attempt
        await self._begin_again(reason)

    @property
    def _newest_step(self) -> int:
        return 0 if self.checkpoints.newest is None else self.checkpoints.newest.step

    async def _begin_again(self, reason: str) -> None:
        """Fresh ranks are ready: have them load the newest checkpoint, and publish."""
        checkpoint = self.checkpoints.newest
        self._go_back_to(self._newest_step)
        if checkpoint is not None:
            await self.checkpoints.load(self._orders, self._ranks, checkpoint)
        issued = self._orders.issued
        weights = 0 if checkpoint is None else checkpoint.policy_version  # version that they were published as
        if weights == issued and not self._relays.anybody_holds(issued):
            await self._publish(max(issued, 0))  # nothing was trained since: it is that version, once more
        else:
            # Rollouts hold weights of steps that are lost: from now on they get those of the checkpoint's line.
            await self._publish(issued + 1)
        self._to_start_anew = False
        if self._drop_stale:
            self._buffer.drop_stale(self._schedule, self.policy_version)
        self._events.emit(TrainerRestarted(step=self.step, lost_steps=self._steps_lost, reason=reason))
        self._steps_lost = 0

    def _go_back_to(self, step: int) -> None:
        """The steps after this one are lost; what they consumed is to be trained (again)."""
        returned = [group for groups in self._since_checkpoint for group in groups] + self._in_training
        self._since_checkpoint.clear()
        self._in_training = []
        self._parts_made = 0
        self._orders.went_back(step)
        self._steps_lost += self.step - step
        self.step = step
        self._buffer.steps_left = self._steps - step
        if whole := [group for group in returned if group.trajectories]:
            self._buffer.give_back(whole)
        if bare := [group for group in returned if not group.trajectories]:
            self._draw_again(bare)

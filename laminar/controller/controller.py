"""The controller: one asyncio process that owns all bookkeeping and drives every worker.

      FetchPrompts                       Generate, PullWeights
  +-----------------+   +-------------+  +----------------------+        +-----------+
  | environment     |-->| prompt pool |->| rollout drivers      |<------>| rollout k |
  | manager         |   +-------------+  | (one per rollout)    | deltas +-----------+
  | (turns, rewards)|                    +----------------------+              ^ pulls from
  |                 |   +-----------------------+   |                          | shared memory
  |                 |<--| partial response pool |<--+ TrajectoryDeltas   +-----------+
  |                 |   +-----------------------+                        | relays    |
  |                 |   +-------------------+   +----------------+       +-----------+
  |                 |-->| experience buffer |-->| trainer driver |--+      ^ Carry
  +-----------------+   +-------------------+   +----------------+  |    +---------------+
        reward            whole groups            TrainStep         +--->| relay manager |
                                                  WeightsPublished       +---------------+

It reads time from its loop and speaks through a `ControllerChannel`, nothing else: the same code runs on a virtual clock
against modelled workers. Every coroutine belongs to the task group in `run`; if one fails, the run ends with its error.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.controller.checkpoints import Checkpoints
from laminar.controller.dynamic_sampling import DynamicSampling
from laminar.controller.environment_manager import EnvironmentManager
from laminar.controller.evaluator import Evaluator
from laminar.controller.experience_buffer import ExperienceBuffer
from laminar.controller.journal.journal import Journal, NoJournal
from laminar.controller.journal.restore import Restored
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.prompt_pool import PromptPool
from laminar.controller.relay import MASTER, Relay, store_name
from laminar.controller.relay_keeper import RelayKeeper
from laminar.controller.relay_manager import RelayManager
from laminar.controller.repack_inputs import RepackInputs
from laminar.controller.repacker import Repacker
from laminar.controller.rollout_driver import RolloutDriver
from laminar.controller.rollout_fleet import Live, RolloutFleet
from laminar.controller.rollout_manager import RolloutManager
from laminar.controller.run_control import RunControl
from laminar.controller.schedules.make_schedule import make_schedule
from laminar.controller.step_metrics import StepMetrics
from laminar.controller.trainer_driver import TrainerDriver
from laminar.controller.turns import Turns
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed
from laminar.observability.events import (
    EventBus,
    GroupDropped,
    Notice,
    StepFinished,
    TrajectoryFailed,
    TrajectoryFinished,
    TrajectoryStarted,
)
from laminar.protocol.channel import ControllerChannel
from laminar.protocol.messages import Shutdown, Welcome, WorkerKind
from laminar.trajectory import Group, Trajectory, TrajectoryState

LEASES_PER_LIFE = 1 << 32  # of one controller: the next one's are higher
HISTORY = 1_000  # trajectories that the REPL can still show after they have left
INVALID_GROUPS = 8  # in a row without a valid reward: it is not the samples that are at fault, but the reward


class Controller:
    """All parts of the picture above, made in the order in which they need each other, and the coroutines that drive them."""

    def __init__(
        self,
        config: ExperimentConfig,
        channel: ControllerChannel,
        events: EventBus,
        *,
        run_id: str,
        run_dir: Path,
        expected_workers: list[str],
        restart: Callable[[str, str], Awaitable[None]],
        version_bytes: int = 0,
        hop_key: bytes | None = None,
        journal: Journal | NoJournal | None = None,
        restored: Restored | None = None,
        patience_s: Callable[[str], float] = lambda name: 0.0,
        closed: Callable[[Worker, str], str] = lambda worker, reason: reason,
        evaluate_only: int | None = None,
    ) -> None:
        """Make it inside the loop that will run it.

        Args:
            restart: starts a lost worker anew, by its name ("rollout-3", "trainer" for all ranks, "relays" for
                all that mpirun has started together) and the reason; raises WorkerLost if it cannot.
            version_bytes: of one weight version; 0 if that is not known before the trainer has loaded the model.
            hop_key: secret of the run, the same for all controllers that it has; a new one if not given.
            journal: where it writes down what the next controller must know.
            restored: where an earlier controller of this run has left off.
            patience_s: how long a worker that knew that one may take to come back, by its name; then it is started anew.
            closed: says why a worker's connection has closed, given what the channel says of it; empty if somebody else
                tells the registry of the loss, and knows better.
            evaluate_only: there are rollouts and environment workers only: evaluate the weights in model.path, which are
                those of this step, and end.
        """
        self.config = config
        self.events = events
        self.run_id = run_id
        self.run_dir = run_dir
        self.now = asyncio.get_running_loop().time
        self.started_at = self.now()
        self.history: OrderedDict[str, Trajectory] = OrderedDict()
        self.control = RunControl(() if restored is None else restored.asked)
        self.journal = journal or NoJournal()
        self._expected = expected_workers
        self._restart = restart
        self._restored = restored
        self._patience_s = patience_s
        self._hop_key = hop_key or secrets.token_bytes(32)
        self._version_bytes = version_bytes
        self._evaluate_only = evaluate_only
        self._schedule = make_schedule(config)
        self._invalid_in_a_row = 0  # groups
        self._make_registry(channel, closed)
        self._make_pools()
        self._make_relays()
        self._make_rollouts()
        self._make_trainer()
        self._connect()
        if restored is not None:
            self._take_back(restored)

    def _make_registry(self, channel: ControllerChannel, closed: Callable[[Worker, str], str]) -> None:
        """Who is connected, and who is silent."""
        self.registry = WorkerRegistry(
            channel,
            self.events,
            expected=self._expected,
            welcome=self._welcome,
            heartbeat_s=self.config.controller.heartbeat_s,
            silence_limit_s=self.config.controller.silence_limit_s,
            start_limit_s=self.config.controller.start_timeout_s,
            closed=closed,
            restored=self._restored is not None,
        )

    def _make_pools(self) -> None:
        """What holds prompts, trajectories and complete groups, and the environments between them."""
        config, restored = self.config, self._restored
        self.environments = EnvironmentManager(
            self.registry, self.events, config, on_scored=self._on_scored, restart=self._restart
        )
        sampling = DynamicSampling(config.algorithm.dynamic_sampling, groups_per_step=config.trainer.groups_per_step)
        self.buffer = ExperienceBuffer(
            self.events, config.buffer, sampling, steps=config.trainer.steps, restored=restored
        )
        life = 0 if restored is None else restored.life
        self.pool = PartialResponsePool(
            mixes_versions=self._schedule.interrupts,
            multi_turn=config.environment.multi_turn,
            first_lease=1 + life * LEASES_PER_LIFE,
        )
        self.prompts = PromptPool(
            self.environments.fetch_prompts,
            self.events,
            max_prompt_tokens=config.data.max_prompt_tokens,
            low_water=max(config.trainer.groups_per_step, groups_at_once(config)),
            restored=restored,
        )

    def _make_relays(self) -> None:
        """The chain of relays, and who starts them anew."""
        self.relays = RelayManager(self.registry, self.events, self.config, restored=self._restored)
        if self._evaluate_only is not None:
            self.relays.serve_folder()
        self.relay_keeper = RelayKeeper(self.registry, self.events, self.relays, self.config, restart=self._restart)

    def _make_rollouts(self) -> None:
        """The rollouts: which there are, what each generates, what is moved between them, what is evaluated on them."""
        config = self.config
        limit_s = config.controller.step_timeout_s
        self.fleet = RolloutFleet(self.registry, self.events, self.relays, self.pool, config, restart=self._restart)
        self.evaluator = Evaluator(
            self.events,
            self.fleet,
            self.pool,
            self.control,
            config,
            fetch=lambda start, count: self.environments.fetch_prompts(start, count, evaluation=True),
        )
        self.rollouts = RolloutManager(
            self.registry,
            self.events,
            self.fleet,
            self.relays,
            self.prompts,
            self.pool,
            self.buffer,
            self._schedule,
            self.control,
            self.evaluator,
            config,
            next_group=0 if self._restored is None else self._restored.next_group,
        )
        self.turns = Turns(self.environments, self.pool, self.fleet, self.events, config)
        self.driver = RolloutDriver(self.rollouts, self.registry, self.events, self.journal, limit_s=limit_s)
        self.repacker = Repacker(
            self.rollouts,
            self.driver,
            self.registry,
            RepackInputs(self.rollouts, self.buffer, self.events, config),
            self.events,
            config.repack,
            limit_s=limit_s,
        )

    def _make_trainer(self) -> None:
        """The trainer, and its checkpoints."""
        restored = self._restored
        self.trainer = TrainerDriver(
            self.registry,
            self.events,
            self.buffer,
            self.relays,
            self._schedule,
            self.control,
            Checkpoints(
                self.registry,
                self.events,
                self.run_dir / "checkpoints",
                run_id=self.run_id,
                limit_s=self.config.controller.step_timeout_s,
                newest=None if restored is None else restored.checkpoint,
            ),
            self.config,
            data_ended=lambda: self.prompts.ended,
            describe_wait=self._describe_wait,
            draw_again=self._draw_again,
            restart=self._restart,
            journal=self.journal,
            restored=restored,
            patience_s=self._patience_s,
        )

    def _connect(self) -> None:
        """What the parts tell each other, and the figures that are made of it."""
        self.metrics = StepMetrics(
            self.events,
            now=self.now,
            trainer_clock=self.trainer.clock,
            rollout_clocks=lambda: {name: replica.clock for name, replica in self.rollouts.replicas.items()},
            gauges=self._gauges,
        )
        self.relays.on_change = self._on_relay
        self.prompts.on_filled = self._on_prompts
        self.control.on_change += [self.fleet.wake_all, lambda: self.journal.note_asked(self.control.asked)]
        self.events.subscribe(lambda _: self.fleet.wake_all(), StepFinished, GroupDropped)
        self.events.subscribe(lambda event: self._remember(event.trajectory), TrajectoryStarted)
        self.events.subscribe(lambda event: self.environments.submit(event.trajectory), TrajectoryFinished)
        self.events.subscribe(lambda event: self._on_failed(event.trajectory), TrajectoryFailed)
        self.journal.subscribe(self.events)

    async def run(
        self, launch: Callable[[], Awaitable[None]], services: Sequence[Callable[[], Awaitable[None]]] = ()
    ) -> None:
        """Start the workers by `launch`, make all steps (or the one evaluation), tell the workers to end.

        Args:
            launch: starts the workers that this process owns.
            services: coroutines that live as long as the run: the REPL's server, the terminal's bar.

        Raises:
            UserError, RunFailed: the first failure of any coroutine of the run.
        """
        try:
            async with asyncio.TaskGroup() as group:
                living: dict[asyncio.Task[None], None] = {}
                background = [
                    group.create_task(self.registry.receive_forever(), name="receive messages"),
                    group.create_task(self.registry.heartbeat_forever(), name="heartbeats"),
                    group.create_task(self.journal.keep_forever(self.pool), name="journal"),
                    *(group.create_task(_service(service), name=service.__qualname__) for service in services),
                ]
                if self._evaluate_only is None:
                    background.append(group.create_task(self.relay_keeper.keep_forever(), name="relay keeper"))
                if self._restored is not None:
                    background += self._start_drivers(group, living)
                    self._await_back(self._restored)
                await launch()
                if self._restored is not None:
                    await self.trainer.run()
                elif await self._all_ready(group):
                    background += self._start_drivers(group, living)
                    if self._evaluate_only is None:
                        await self.trainer.run()
                    else:
                        self.evaluator.ask(step=self._evaluate_only)
                await self.evaluator.finish(self.config.controller.step_timeout_s)
                for task in (*background, *living):
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            await self.registry.send_all(Shutdown(reason="the run has ended"))
            self.journal.note_tails(self.pool)

    async def _all_ready(self, group: asyncio.TaskGroup) -> bool:
        """Wait until all workers are; false if the run was stopped before."""
        ready = group.create_task(
            self.registry.wait_until_ready(self.config.controller.start_timeout_s), name="wait for workers"
        )
        stopped = group.create_task(self.control.stop_requested.wait(), name="wait for a stop")
        await asyncio.wait([ready, stopped], return_when=asyncio.FIRST_COMPLETED)
        come = ready.done()
        for task in (ready, stopped):
            task.cancel()
        return come

    def _take_back(self, restored: Restored) -> None:
        """What an earlier controller has left, into the parts that hold it."""
        self.journal.knows(restored)
        self.evaluator.take_back(restored)
        for group in restored.outstanding:
            for trajectory in group.trajectories:
                self._remember(trajectory)
                if trajectory.finish_reason is None:
                    self.pool.take_back(trajectory)
                elif trajectory.state is TrajectoryState.FINISHED:
                    self.environments.submit(trajectory)

    def _await_back(self, restored: Restored) -> None:
        """Every worker may have lived through the change of controllers."""
        workers = list(self._expected)
        self.fleet.take_back(self.pool, restored.rollouts, self._patience_s)
        for trajectory in self.pool:
            if trajectory.state is TrajectoryState.ENVIRONMENT:
                self.turns.ask_again(trajectory)
        self.relay_keeper.await_back(self._patience_s)
        environments = [name for name in workers if name.startswith("environment-")]
        self.environments.await_back(environments, self._patience_s)

    def _draw_again(self, groups: list[Group]) -> None:
        self.journal.note_again(groups)
        self.buffer.forget(groups)
        self.prompts.put_back(group.prompt for group in groups)

    def _start_drivers(
        self, group: asyncio.TaskGroup, living: dict[asyncio.Task[None], None]
    ) -> list[asyncio.Task[None]]:
        """One task per part of the picture; all end by cancellation at the end of the run.

        `living` holds the tasks of the rollouts that are there at the moment.
        """
        self.metrics.start()
        tasks = [
            group.create_task(self.environments.serve_forever(), name="environment manager"),
            group.create_task(self.environments.watch_forever(), name="watch over environment workers"),
            group.create_task(self.evaluator.evaluate_forever(), name="evaluator"),
        ]
        tasks.append(group.create_task(self.driver.watch_forever(), name="watch over rollouts"))
        tasks.append(group.create_task(self.fleet.watch_forever(), name="rollouts' heartbeats"))
        if self._evaluate_only is None:
            tasks.append(group.create_task(self.prompts.fill_forever(), name="prompt pool"))
            tasks.append(group.create_task(self.relays.broadcast_forever(), name="relay manager"))
        lives: list[Live] = [self.driver.drive]
        if (
            self.config.schedule.name == "laminar"
        ):  # under the others an emptied rollout would have to wait for them all
            lives.append(self.repacker.poll_forever)
            tasks.append(group.create_task(self.repacker.repack_forever(), name="repacker"))

        def spawn(life: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
            task = group.create_task(life, name=name)
            living[task] = None
            task.add_done_callback(living.pop)
            return task

        self.fleet.start(spawn, lives)
        return tasks

    def _welcome(self, kind: WorkerKind, index: int) -> Welcome:
        stores = {"trainer": store_name(MASTER), "relay": store_name(index)}
        return Welcome(
            run_id=self.run_id,
            run_dir=str(self.run_dir),
            config=self.config.model_dump_json(),
            store=stores.get(kind, ""),
            hop_key=self._hop_key,
            version_bytes=self._version_bytes,
        )

    def _on_prompts(self) -> None:
        self.fleet.wake_all()
        self.buffer.changed.set()  # the data may have ended

    def _on_relay(self, relay: Relay) -> None:
        self.rollouts.relay_changed(relay)
        if self.relays.must_publish_again:
            self.buffer.changed.set()

    def _on_failed(self, trajectory: Trajectory) -> None:
        """The environment failed for good on a member of a group, or of an evaluation."""
        if trajectory.evaluation is not None:
            self.evaluator.scored(trajectory)
            return
        if self.config.environment.on_error == "fail":
            raise RunFailed(
                f"{trajectory.error}. Set environment.on_error: drop to leave such groups out and count them"
            )
        group = self.buffer.get(trajectory.group_id)
        if group is not None:
            self.events.emit(Notice(level="warning", text=f"dropped group {group.group_id}: {trajectory.error}"))
            self.buffer.drop(group, trajectory.error or "")

    def _on_scored(self, trajectory: Trajectory) -> None:
        """A member of a group, or of an evaluation, has its reward, or never will."""
        if trajectory.evaluation is not None:
            self.evaluator.scored(trajectory)
            return
        group = self.buffer.get(trajectory.group_id)
        if group is None:
            return
        if trajectory.error:
            if self.config.reward.on_invalid == "fail":
                raise RunFailed(
                    f"{trajectory.error}. Set reward.on_invalid: drop to leave such groups out and count them"
                )
            self._count_invalid(trajectory.error)
            self.events.emit(Notice(level="warning", text=f"dropped group {group.group_id}: {trajectory.error}"))
            self.buffer.drop(group, trajectory.error)
            return
        if not trajectory.reward_error:
            self._invalid_in_a_row = 0
        if all(member.state is TrajectoryState.SCORED for member in group.trajectories):
            self._note_zeroes(group)
            self.buffer.complete(group, published_version=self.trainer.policy_version)

    def _count_invalid(self, error: str) -> None:
        """A group had no valid reward, or is dropped for want of one.

        Raises:
            RunFailed: so had as many before it, and no trajectory got one meanwhile.
        """
        self._invalid_in_a_row += 1
        if self._invalid_in_a_row == INVALID_GROUPS:
            raise RunFailed(
                f"{error}. {INVALID_GROUPS} groups in a row had no valid reward, and no other trajectory got one meanwhile"
            )

    def _note_zeroes(self, group: Group) -> None:
        """Of a complete group: which rewards are none, and count as 0. Raises RunFailed as `_count_invalid`."""
        errors = [member.reward_error for member in group.trajectories if member.reward_error]
        if not errors:
            return
        if len(errors) == len(group.trajectories):
            self._count_invalid(errors[0])
        text = f"{len(errors)} of {len(group.trajectories)} rewards of group {group.group_id} count as 0: {errors[0]}"
        self.events.emit(Notice(level="warning", text=text))

    def _remember(self, trajectory: Trajectory) -> None:
        self.history[trajectory.trajectory_id] = trajectory
        while len(self.history) > HISTORY:
            self.history.popitem(last=False)

    def _gauges(self) -> dict[str, float]:
        return {
            "buffer_groups": len(self.buffer),
            "groups_in_progress": self.buffer.in_progress,
            "trajectories_in_progress": len(self.pool),
            "scores_pending": self.environments.pending_scores,
            "turns_pending": self.turns.pending,
            "rewards_invalid": self.environments.invalid_rewards,
        }

    def _describe_wait(self) -> str:
        """Where all groups are, for the message of a wait that took too long."""
        rollouts = ", ".join(
            f"{replica.name}: {replica.clock.state}, {len(replica.in_flight)} trajectories, version {replica.policy_version}"
            for replica in self.rollouts.replicas.values()
        )
        return (
            f"{len(self.buffer)} groups ready, {self.buffer.in_progress} in progress, "
            f"{self.turns.pending} turns at the environment, {self.environments.pending_scores} rewards pending, {len(self.prompts)} prompts at hand; {rollouts}"
        )


def groups_at_once(config: ExperimentConfig) -> int:
    """Groups that all rollouts together can have in flight."""
    return config.rollout.replicas * max(1, config.rollout.max_running // config.trainer.group_size)


async def _service(service: Callable[[], Awaitable[None]]) -> None:
    await service()


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of a group of failures: the one that made the others end."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure

"""A whole run in virtual time: the controller as it is, modelled workers, and the network between them.

Invariant: the same experiment, models and seed give the same events, in any process. `docs/simulation-models.md` lists what is
modelled and how.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.controller.controller import Controller
from laminar.controller.journal.journal import Journal
from laminar.controller.journal.restore import Restored
from laminar.errors import UserError
from laminar.launch.commands import expected_workers
from laminar.observability.events import EventBus, StepFinished
from laminar.observability.states import TRAINER_BUSY
from laminar.simulation.channels.network import SimulatedNetwork
from laminar.simulation.clock.virtual_time import VirtualTimeLoop, run_in_virtual_time
from laminar.simulation.cluster_models import ClusterModels
from laminar.simulation.models.engine_figures import engine_figures
from laminar.simulation.models.engine_model import RooflineEngine
from laminar.simulation.models.engine_statistics import EngineStatistics
from laminar.simulation.models.language_models import check_fits
from laminar.simulation.records.gpu_seconds import RecordedCluster
from laminar.simulation.records.record import RunRecord
from laminar.simulation.records.recorder import RunRecorder
from laminar.simulation.virtual_journal import VirtualJournal
from laminar.simulation.workers.carrier import ModelledCarrier
from laminar.simulation.workers.environment_worker import ModelledEnvironment
from laminar.simulation.workers.kv_shelf import KvShelf
from laminar.simulation.workers.modelled_worker import Life, ModelledWorker
from laminar.simulation.workers.relay_worker import ModelledRelay
from laminar.simulation.workers.rollout_worker import ModelledRollout
from laminar.simulation.workers.supervisor import Supervisor
from laminar.simulation.workers.token_arrays import TokenArrays
from laminar.simulation.workers.trainer_worker import ModelledTrainer
from laminar.simulation.workers.weight_stores import WeightStores


@dataclass(kw_only=True, slots=True, frozen=True)
class RunOptions:
    """How the run is made."""

    heartbeats: bool = False  # workers send them; without, silence says nothing and is not looked at
    hosts: int = 1  # of relays and rollouts, by turns; all others are on the first
    latency_s: float | Callable[[str], float] = (
        0.0  # of a message, or what gives it by peer; nothing beside the models' seconds
    )
    through_codec: bool = False
    start_s: float = 1.0  # of a worker, from Welcome to Ready
    restart_s: float = 5.0  # to start a process
    notice_s: float = 0.1  # to notice the end of a process
    prompts: int | None = None  # after these the data ends
    journal_s: float | None = (
        None  # from a change until it is written; None: no journal, the controller must not be lost
    )
    controller_restart_s: float = 2.0  # from the loss of the controller until another takes its place
    patience_s: float = 20.0  # of that one, for workers to come back
    warm_up_steps: int = 0
    cool_down_steps: int = 0


NEVER_S = 1e9  # an interval that no run reaches


class SimulatedRun:
    """One run. Subscribe to `events`, or give `before`, and call `run`; it can be called once."""

    def __init__(
        self,
        experiment: ExperimentConfig,
        models: ClusterModels,
        *,
        seed: int = 0,
        options: RunOptions | None = None,
        before: Callable[[SimulatedRun], None] = lambda run: None,
    ) -> None:
        """
        Args:
            seed: of the network and of rewards; the workload has its own.
            before: called in the loop, when all is made and nothing has started: for faults and invariants.

        Raises:
            UserError: the model or the longest trajectory does not fit onto a rollout.
        """
        self.options = options or RunOptions()
        controller, rollout = experiment.controller, experiment.rollout
        if not self.options.heartbeats:
            controller = controller.model_copy(update={"heartbeat_s": NEVER_S, "silence_limit_s": NEVER_S})
            rollout = rollout.model_copy(update={"suspect_after_s": NEVER_S, "silence_limit_s": NEVER_S})
        self.experiment = experiment.model_copy(update={"controller": controller, "rollout": rollout})
        self.models = models
        self.events = EventBus()
        self.loop: VirtualTimeLoop  # this and the next three are there once the run has begun
        self.controller: Controller
        self.network: SimulatedNetwork
        self.journal: VirtualJournal | None = None
        self.on_taken_up: Callable[[Restored], None] = lambda restored: None  # another controller is about to run
        self.controller_lost: asyncio.Event
        self.supervisor: Supervisor
        self.stores = WeightStores()
        self.shelf = KvShelf(models.model.kv_bytes_per_token)
        self._weight_times = models.weight_times(experiment)
        self._trainer_times = models.trainer_times(experiment)
        self._seed = seed
        self._before = before
        self._arrays = TokenArrays()
        self._carriers: dict[str, ModelledCarrier] = {}
        self._ranks: list[ModelledTrainer] = []
        self._engines: dict[str, RooflineEngine] = {}
        self._at_start: dict[str, EngineStatistics] = {}
        self._at_end: dict[str, EngineStatistics] = {}
        longest = models.workload.max_prompt_tokens + experiment.rollout.max_response_tokens
        if models.kv_capacity_tokens is None:
            check_fits(models.model, models.gpu, models.tensor_parallel, longest, models.constants)
        elif models.kv_capacity_tokens < longest:
            raise UserError(
                f"kv_capacity_tokens: {models.kv_capacity_tokens}; expected at least {longest}, a trajectory of full length"
            )

    @property
    def workers(self) -> Mapping[str, ModelledWorker]:
        """The newest process of each worker, by name."""
        return self.supervisor.workers

    def run(self, limit_s: float = 1e9) -> RunRecord:
        """Make the run, in virtual time, and record it.

        Raises:
            RuntimeError: the run ended before any measured step.
            UserError, RunFailed, VirtualTimeError: see `make`.
        """
        started = time.process_time()
        recorder = self.make(limit_s)
        engine, kv_utilization = engine_figures(self._engines, self._at_start, self._at_end)
        return recorder.record(
            engine=engine,
            kv_utilization=kv_utilization,
            host_s=time.process_time() - started,
            host_events=self.loop.callbacks_run,
        )

    def make(self, limit_s: float = 1e9) -> RunRecorder:
        """Make the run, in virtual time, to whatever end.

        Raises:
            UserError, RunFailed: how the controller ended the run.
            VirtualTimeError: it is not done after `limit_s` virtual seconds, is stuck, or something failed unseen.
        """
        with _without_collector():
            return run_in_virtual_time(self._main(), limit_s=limit_s)

    async def _main(self) -> RunRecorder:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.loop = loop
        options = self.options
        self.network = SimulatedNetwork(latency=options.latency_s, seed=self._seed, through_codec=options.through_codec)
        self.supervisor = Supervisor(
            self._start,
            restart_s=options.restart_s,
            notice_s=options.notice_s,
        )
        if options.journal_s is not None:
            self.journal = VirtualJournal(write_s=options.journal_s)
        self.controller_lost = asyncio.Event()
        self._make_controller(None)
        recorder = RunRecorder(self.events, loop.time, self._recorded_cluster(), trainer_busy_s=self._trainer_busy_s)
        self.events.subscribe(self._on_step, StepFinished)
        self._before(self)

        try:
            while not await self._one_life():
                await asyncio.sleep(options.controller_restart_s)
                self._take_up()
        finally:
            self.supervisor.end()
        return recorder

    async def _one_life(self) -> bool:
        """Of a controller: true if the run has ended with it, false if it was lost."""
        run = asyncio.create_task(self.controller.run(self._launch), name="controller")
        lost = asyncio.create_task(self.controller_lost.wait(), name="the controller's loss")
        try:
            waits: list[asyncio.Future[Any]] = [run, self.supervisor.failure, lost]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                run.cancel()
                await asyncio.wait([run])
                if self.controller_lost.is_set():
                    run.cancelled() or run.exception()  # what a dead process would have died of concerns nobody
                    return False
                self.supervisor.failure.result()
            run.result()
            self.controller.journal.close()
        finally:
            lost.cancel()
        return True

    async def _launch(self) -> None:
        if not self.supervisor.workers:
            for name in expected_workers(self.experiment):
                self.supervisor.start(name)
            if self.options.warm_up_steps == 0:
                self._at_start = self._engine_statistics()

    def _make_controller(self, restored: Restored | None) -> None:
        """One life of the controller, on a bus of its own: what it leaves behind hears nothing of the next."""
        events, life = self.events, 0 if restored is None else restored.life
        journal = None
        if self.journal is not None:
            events = EventBus()
            journal = Journal(
                self.journal.writer(),
                keep_checkpoints=self.experiment.trainer.keep_checkpoints,
                keep_trained=self.experiment.trainer.checkpoint_every > 0,
                limit_s=self.experiment.controller.step_timeout_s,
            )
        self._life = life

        async def restart(name: str, reason: str) -> None:
            if life == self._life and not self.controller_lost.is_set():
                await self.supervisor.restart(name, reason)

        self.controller = Controller(
            self.experiment,
            self.network.controller,
            events,
            run_id="simulated",
            run_dir=Path("/nonexistent"),  # nothing is written: checkpoints are modelled
            expected_workers=expected_workers(self.experiment),
            restart=restart,
            journal=journal,
            restored=restored,
            patience_s=lambda name: self.options.patience_s,
        )
        if events is not self.events:
            events.subscribe(lambda event: self._hear(life, event))
        self.supervisor.watch_for(self.controller.registry, self.controller.relay_keeper)

    def _hear(self, life: int, event: object) -> None:
        if life == self._life and not self.controller_lost.is_set():
            self.events.emit(event)

    def lose_controller(self) -> None:
        """Its process is killed; another takes its place from the journal, and the workers live on."""
        assert self.journal is not None
        if not self.controller_lost.is_set():
            self.controller_lost.set()
            self.network.lose_controller()
            self.journal.lose_unwritten()
            self.supervisor.watch_for(None, None)

    def _take_up(self) -> None:
        assert self.journal is not None
        restored = self.journal.restore()
        self.controller_lost.clear()
        self._make_controller(restored)
        self.on_taken_up(restored)
        for worker in self.supervisor.workers.values():
            worker.after(self.options.notice_s, self._find_controller, worker, restored.life)

    def _find_controller(self, worker: ModelledWorker, life: int) -> None:
        if life == self._life and not self.controller_lost.is_set():
            worker.controller_back()

    # ------------------------------------------------------------ workers

    def _start(self, name: str, number: int, world: str) -> ModelledWorker:
        kind, _, index = name.rpartition("-")
        config, models, options = self.experiment, self.models, self.options
        life = Life(
            index=int(index),
            number=number,
            host=f"host-{int(index) % options.hosts if kind in ('relay', 'rollout') else 0}",
            start_s=options.start_s,
            heartbeat_s=config.controller.heartbeat_s if options.heartbeats else None,
        )
        if kind == "rollout":
            engine = self._engines[name] = RooflineEngine(
                models.model,
                models.gpu,
                models.tensor_parallel,
                config.rollout.max_running,
                models.constants,
                kv_capacity_tokens=models.kv_capacity_tokens,
            )
            return ModelledRollout(
                self.network,
                life,
                engine=engine,
                workload=models.workload,
                times=self._weight_times,
                stores=self.stores,
                shelf=self.shelf,
                arrays=self._arrays,
                delta_interval_s=config.rollout.delta_interval_s,
                multi_turn=config.environment.multi_turn,
            )
        if kind == "relay":
            return ModelledRelay(
                self.network,
                life,
                times=self._weight_times,
                stores=self.stores,
                carriers=self._carriers,
                keep_versions=config.relay.keep_versions,
                world=world,
            )
        if kind == "trainer":
            if int(index) == 0:
                self._ranks = []  # a new world
            rank = ModelledTrainer(
                self.network,
                life,
                times=self._trainer_times,
                stores=self.stores,
                ranks=self._ranks,
                weight_times=self._weight_times,
                carriers=self._carriers,
                keep_versions=config.relay.keep_versions,
            )
            self._ranks.append(rank)
            return rank
        return ModelledEnvironment(
            self.network,
            life,
            workload=models.workload,
            rewards=models.rewards,
            seed=self._seed,
            prompts=options.prompts,
        )

    # ------------------------------------------------------------ figures

    def _recorded_cluster(self) -> RecordedCluster:
        replicas = self.experiment.rollout.replicas
        return RecordedCluster(
            gpus=self.models.gpus,
            trainer_gpus=self.models.trainer_gpus,
            gpus_per_rollout=self.models.tensor_parallel,
            rollouts=[f"rollout-{index}" for index in range(replicas)],
            steps=self.experiment.trainer.steps,
            warm_up_steps=self.options.warm_up_steps,
            cool_down_steps=self.options.cool_down_steps,
        )

    def _trainer_busy_s(self) -> float:
        totals = self.controller.trainer.clock.totals()
        return sum(totals.get(state, 0.0) for state in TRAINER_BUSY)

    def _on_step(self, event: StepFinished) -> None:
        if event.step == self.options.warm_up_steps:
            self._at_start = self._engine_statistics()
        if event.step == self.experiment.trainer.steps - self.options.cool_down_steps:
            self._at_end = self._engine_statistics()

    def _engine_statistics(self) -> dict[str, EngineStatistics]:
        now = asyncio.get_running_loop().time()
        return {name: engine.statistics(now) for name, engine in self._engines.items()}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's cycle collector off: millions of live objects make it slow, and a run makes few cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""From a study's config to its cases: for each an experiment, as a real run would have it, and the models behind it.

Invariant: whatever is wrong with any case is found here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from laminar.config.checks import check_config
from laminar.config.data_schema import DataConfig, ReasoningGymComponent, ReasoningGymSource
from laminar.config.problems import raise_problems
from laminar.config.schema import (
    ControllerConfig,
    ExperimentConfig,
    ModelConfig,
    RelayConfig,
    RepackConfig,
    RolloutConfig,
    ScheduleConfig,
    TrainerConfig,
)
from laminar.controller.schedules.make_schedule import IN_ORDER, max_staleness, schedule_problems
from laminar.errors import UserError
from laminar.simulation.cluster_models import ClusterModels
from laminar.simulation.models.hardware import GpuSpec
from laminar.simulation.models.language_models import ModelSpec, check_fits
from laminar.simulation.models.relay_model import relay_chain
from laminar.simulation.models.workload import Workload
from laminar.simulation.study import split as splits
from laminar.simulation.study.config import ScheduleName, SimulationConfig, StudyModel, StudySchedule
from laminar.simulation.study.split import FirstBatch, Load, Split
from laminar.simulation.study.study_models import constants, gpu_spec, model_spec, workload

T = TypeVar("T")
Chosen = Literal["auto", "shared"] | int | float

SCHEDULES: tuple[ScheduleName, ...] = ("synchronous", "one_step", "stream", "partial", "laminar")
NEVER_S = 1e9  # a limit that no study reaches


@dataclass(kw_only=True, slots=True, frozen=True)
class PlannedCase:
    """One run to be made."""

    label: str  # of the schedule
    split: Split
    experiment: ExperimentConfig
    models: ClusterModels

    def __str__(self) -> str:
        repack = ", repack" if self.experiment.repack.enabled else ""
        return f"{self.models.model.name}, {self.models.gpus} GPUs, {self.label}{repack}"


def plan_cases(config: SimulationConfig) -> list[PlannedCase]:
    """All cases, in the order of models, sizes and schedules.

    Raises:
        UserError: one text with everything that makes a case impossible.
    """
    problems = list(_study_problems(config))
    found = _Collector(problems)
    gpu = found.of(partial(gpu_spec, config.hardware))
    work = found.of(partial(workload, config.workload, config))
    shapes = [(one, found.of(partial(model_spec, one))) for one in _models(config)]
    raise_problems(f"study {config.name}", list(dict.fromkeys(problems)))
    assert gpu is not None and work is not None  # otherwise there was a problem
    planner = _Planner(config, gpu, work)
    cases = []
    for model, shape in shapes:
        assert shape is not None
        for gpus in dict.fromkeys(model.sizes or config.sizes):
            for schedule in schedules(config):
                case = found.of(partial(planner.case, model, shape, gpus, schedule))
                if case is not None:
                    cases.append(case)
    raise_problems(f"study {config.name}", list(dict.fromkeys(problems)))
    return cases


def schedules(config: SimulationConfig) -> list[StudySchedule]:
    """The study's schedules, each with its options."""
    if config.schedules is None:
        names = (*SCHEDULES, "laminar")
        return [StudySchedule(name=name, repack=k == len(SCHEDULES)) for k, name in enumerate(names)]
    return [StudySchedule(name=one) if isinstance(one, str) else one for one in config.schedules]


class _Planner:
    """What all cases of a study share."""

    def __init__(self, config: SimulationConfig, gpu: GpuSpec, work: Workload) -> None:
        self._config = config
        self._gpu = gpu
        self._workload = work
        self._constants = constants(config.hardware)
        self._batch = FirstBatch(work, config.batch.groups_per_step, config.batch.group_size)

    def case(self, model: StudyModel, shape: ModelSpec, gpus: int, schedule: StudySchedule) -> PlannedCase:
        """One case.

        Raises:
            UserError: it cannot be run.
        """
        label = schedule.label or schedule.name
        where = f"{shape.name}, {gpus} GPUs, {label}"
        try:
            degree = model.tensor_parallel or splits.default_tensor_parallel(shape, self._gpu, self._constants)
            longest = self._workload.max_prompt_tokens + self._workload.max_response_tokens
            check_fits(shape, self._gpu, degree, longest, self._constants)
            if gpus < degree:
                raise UserError(
                    f"sizes: {gpus} GPUs do not hold one rollout of tensor_parallel {degree}; take a larger size"
                )
            load = self._load(shape, degree, schedule)
            split = self._split(load, gpus, schedule)
            experiment = self._experiment(load, split, schedule)
            for problem in schedule_problems(experiment):
                raise UserError(problem)
            check_config(experiment)
            models = ClusterModels(
                model=shape,
                gpu=self._gpu,
                gpus=gpus,
                tensor_parallel=degree,
                trainer_gpus=split.trainer_gpus,
                workload=self._workload,
                weight_sync=schedule.weights or ("relays" if schedule.name == "laminar" else "global"),
                constants=self._constants,
            )
            models.trainer_times(experiment)  # refuses a trainer that cannot hold the model
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return PlannedCase(label=label, split=split, experiment=experiment, models=models)

    def _load(self, shape: ModelSpec, degree: int, schedule: StudySchedule) -> Load:
        experiment = self._experiment_of(schedule, 1, degree, self._config.batch.group_size, 1)
        bound = max_staleness(experiment)
        return Load(
            model=shape,
            gpu=self._gpu,
            constants=self._constants,
            tensor_parallel=degree,
            batch=self._batch,
            mini_batches=self._config.batch.mini_batches,
            kind=_kind(schedule.name),
            batches_under_way=experiment.schedule.outstanding_batches if bound is None else bound + 1,
        )

    def _split(self, load: Load, gpus: int, schedule: StudySchedule) -> Split:
        default: Chosen = "shared" if schedule.name == "synchronous" else self._config.split
        chosen: Chosen = default if schedule.split is None else schedule.split
        if chosen == "shared":
            if schedule.name != "synchronous":
                raise UserError(
                    f"split: shared; under `{schedule.name}` rollouts and trainer work at the same time, so they cannot take turns "
                    "on the same GPUs; expected auto, a number or a fraction"
                )
            return splits.shared(gpus, load.tensor_parallel)
        if isinstance(chosen, int | float):
            return splits.fixed(gpus, chosen, load.tensor_parallel)
        return splits.balanced(load, gpus)

    def _experiment(self, load: Load, split: Split, schedule: StudySchedule) -> ExperimentConfig:
        replicas = split.rollout_gpus // load.tensor_parallel
        running = schedule.max_running or self._config.rollout.max_running or splits.max_running(load, replicas)
        per_host = self._constants.gpus_per_host
        relays = 1 + -(-split.rollout_gpus // per_host)  # the master, and one per rollout host
        experiment = self._experiment_of(schedule, replicas, load.tensor_parallel, running, relays)
        chain = relay_chain(load.model, relays, self._constants)
        # The chunk size that the chain's formula wants for this model; the default of an experiment is for small ones.
        relay = experiment.relay.model_copy(update={"chunk_mib": chain.nbytes / chain.best_chunks / (1 << 20)})
        return experiment.model_copy(update={"relay": relay})

    def _experiment_of(
        self, schedule: StudySchedule, replicas: int, degree: int, running: int, relays: int
    ) -> ExperimentConfig:
        config, work = self._config, self._workload
        longest = work.max_prompt_tokens + work.max_response_tokens
        return ExperimentConfig(
            name=config.name,
            seed=config.seed,
            model=ModelConfig(path="modelled", dtype="bfloat16"),
            data=DataConfig(
                source=ReasoningGymSource(type="reasoning_gym", datasets=[ReasoningGymComponent(name="modelled")]),
                max_prompt_tokens=work.max_prompt_tokens,
            ),
            rollout=RolloutConfig(
                replicas=replicas,
                tensor_parallel=degree,
                max_running=running,
                max_response_tokens=work.max_response_tokens,
                # Repack judges by the tokens that have come how much longer a trajectory will take.
                delta_interval_s=min(
                    config.rollout.delta_interval_s, config.repack.interval_s if schedule.repack else NEVER_S
                ),
            ),
            relay=RelayConfig(count=relays, broadcast_timeout_s=NEVER_S),
            trainer=TrainerConfig(
                ranks=1,  # one modelled rank stands for all
                steps=config.steps,
                groups_per_step=config.batch.groups_per_step,
                group_size=config.batch.group_size,
                mini_batches=config.batch.mini_batches,
                max_tokens_per_micro_batch=longest,
                checkpoint_every=config.checkpoint_every,
            ),
            schedule=_schedule_config(schedule),
            buffer=config.buffer,
            repack=RepackConfig(
                enabled=schedule.repack,
                interval_s=config.repack.interval_s,
                kv_ceiling=config.repack.kv_ceiling,
                batch_bound="auto" if config.repack.batch_bound is None else min(config.repack.batch_bound, running),
                slowdown=config.repack.slowdown,
            ),
            controller=ControllerConfig(start_timeout_s=NEVER_S, step_timeout_s=NEVER_S),
        )


def _schedule_config(schedule: StudySchedule) -> ScheduleConfig:
    if schedule.outstanding_batches is None:
        return ScheduleConfig(name=schedule.name, max_staleness=schedule.max_staleness)
    return ScheduleConfig(
        name=schedule.name, max_staleness=schedule.max_staleness, outstanding_batches=schedule.outstanding_batches
    )


def _kind(schedule: ScheduleName) -> splits.GenerationKind:
    if schedule in IN_ORDER:
        return "in_order"
    return "always_full" if schedule == "partial" else "draining"


class _Collector:
    """Collects what goes wrong, so that all of it can be said at once."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def of(self, make: Callable[[], T]) -> T | None:
        """What it makes, or None."""
        try:
            return make()
        except UserError as error:
            self._problems.append(str(error))
            return None


def _models(config: SimulationConfig) -> list[StudyModel]:
    return [StudyModel(shape=one) if isinstance(one, str) else one for one in config.models]


def _study_problems(config: SimulationConfig) -> Iterable[str]:
    unmeasured = config.warm_up_steps + config.cool_down_steps
    if config.steps <= unmeasured:
        yield (
            f"steps: {config.steps}; expected more than warm_up_steps + cool_down_steps ({unmeasured}), for nothing would be "
            "measured; raise it or lower those"
        )
    seen = set()
    for one in schedules(config):
        kind = (one.label or one.name, one.repack, one.split)
        if kind in seen:
            yield (
                f"schedules: `{kind[0]}` is there twice with the same repack and split, so the reports could not tell the "
                "entries apart; give one of them a `label`"
            )
        seen.add(kind)

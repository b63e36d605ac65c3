"""How the GPUs of a case are divided between rollouts and trainer, and how much each rollout holds at once.

Invariant: one rule for all schedules, from the models alone; no figure of the paper, and none of a run, goes into it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from laminar.errors import UserError
from laminar.simulation.models.engine_model import RooflineEngine
from laminar.simulation.models.hardware import Constants, GpuSpec
from laminar.simulation.models.language_models import ModelSpec, kv_capacity
from laminar.simulation.models.step_time import StepCosts
from laminar.simulation.models.trainer_model import TrainerModel
from laminar.simulation.models.workload import Workload

WEIGHTS_SHARE = 1 / 3  # of the engine's memory: at most so much for weights, by the default tensor parallel degree
KV_CEILING = 0.9  # of the KV cache: what a rollout is filled to
MOST_RUNNING = 1024  # trajectories of one engine at once


@dataclass(kw_only=True, slots=True, frozen=True)
class Split:
    """GPUs of each side; together more than the cluster has where they take turns."""

    rollout_gpus: int
    trainer_gpus: int


# How a schedule keeps its rollouts busy: batch after batch, each to its longest trajectory; each rollout for itself, draining
# before it takes new weights; or all the time, because trajectories go on with the new weights.
GenerationKind = Literal["in_order", "draining", "always_full"]


class FirstBatch:
    """The first step's trajectories, the sample that all estimates go by."""

    def __init__(self, workload: Workload, groups: int, group_size: int) -> None:
        """Ask the workload for all of them."""
        members = range(group_size)
        self.groups = groups
        self.group_size = group_size
        self.prompts = [workload.prompt_tokens(prompt) for prompt in range(groups)]
        self.pauses = [[workload.pauses(prompt, member) for member in members] for prompt in range(groups)]
        self.responses = np.array(
            [[workload.response_tokens(prompt, member) for member in members] for prompt in range(groups)], np.int64
        )  # int64 [groups, group_size]
        in_tools = [[sum(seconds for _, seconds in calls) for calls in row] for row in self.pauses]
        self.tool_seconds = np.array(in_tools, np.float64)  # float64 [groups, group_size]
        # Met at a random time of steady decoding, a trajectory of L tokens is met with a weight of L, half-way through on average.
        lengths = self.responses.astype(np.float64)
        self.mean_prompt = sum(self.prompts) / groups
        self.kv_tokens_held = float(np.square(lengths).sum() / lengths.sum() / 2 + self.mean_prompt / group_size)


@dataclass(kw_only=True, slots=True, frozen=True)
class Load:
    """One step's batch and what it runs on: all that estimates need."""

    model: ModelSpec
    gpu: GpuSpec
    constants: Constants
    tensor_parallel: int
    batch: FirstBatch
    mini_batches: int
    kind: GenerationKind
    batches_under_way: float  # most that may be admitted and not trained


def default_tensor_parallel(model: ModelSpec, gpu: GpuSpec, constants: Constants) -> int:
    """The smallest power of two that leaves two thirds of the engine's memory to KV cache; what fits best if none does."""
    memory = constants.gpu_memory_share * gpu.memory_bytes
    degrees = [degree for degree in (1, 2, 4, 8, 16, 32, 64) if model.query_heads % degree == 0]
    enough = [degree for degree in degrees if model.weight_bytes <= WEIGHTS_SHARE * degree * memory]
    return enough[0] if enough else degrees[-1]


def max_running(load: Load, replicas: int) -> int:
    """Trajectories that a rollout holds at once, in whole groups.

    Under schedules in order an even share of the batch. Under the others what the KV cache holds in steady decoding, but not
    more than an even share of what the bound on staleness lets be under way.
    """
    batch = load.batch
    most = MOST_RUNNING // batch.group_size
    if load.kind == "in_order":
        return min(most, -(-batch.groups // replicas)) * batch.group_size
    capacity = KV_CEILING * kv_capacity(load.model, load.gpu, load.tensor_parallel, load.constants)
    most = min(most, int(capacity / batch.kv_tokens_held) // batch.group_size)
    most = min(most, math.ceil(load.batches_under_way * batch.groups / replicas))
    return max(1, most) * batch.group_size


def generation_seconds(load: Load, replicas: int) -> float:
    """Estimate for one step's batch.

    In order: until its longest trajectory has ended. Otherwise the rate of rollouts that hold up to `max_running`, be it all
    the time or with drains for new weights; but while the longest trajectory is under way no more than `batches_under_way`
    batches can be trained.
    """
    if load.kind == "in_order":
        return _drain_seconds(load, -(-load.batch.groups // replicas))
    groups = max_running(load, replicas) // load.batch.group_size
    # Fewer than may be: where the bound on staleness leaves too few trajectories for all, none is full.
    held = sorted({max(1, groups * k // 8) for k in range(1, 9)})
    return min(_rate_seconds(load, replicas, k) for k in held)


def _rate_seconds(load: Load, replicas: int, groups: int) -> float:
    """Seconds of a batch with rollouts that hold so many groups."""
    batch = load.batch
    running = groups * batch.group_size
    costs = StepCosts(load.model, load.gpu, load.tensor_parallel, load.constants)
    step_s = costs.steps(running, int(running * batch.kv_tokens_held)).seconds(1)
    prefill_s = running * costs.prefill_seconds(int(batch.mean_prompt), 0) / batch.group_size
    trajectory_s = batch.responses * step_s + batch.tool_seconds  # float64 [groups, group_size]
    mean_s = float(trajectory_s.mean()) + prefill_s
    work = trajectory_s.size / replicas  # trajectories per rollout and step
    if load.kind == "always_full":
        seconds = work * mean_s / running
    else:
        # A step takes T. A rollout gets new weights half-way through a step on average, tops up for T / 2, and drains for D. In
        # T / 2 + D it makes running + running / mean_s * T / 2 trajectories; it has to make `work` in T.
        drain_s = _drain_seconds(load, groups)
        square, linear = running / (2 * mean_s), running - work / 2
        seconds = (math.sqrt(linear**2 + 4 * square * work * drain_s) - linear) / (2 * square)
    return max(seconds, float(trajectory_s.max()) / load.batches_under_way)


def _drain_seconds(load: Load, groups: int) -> float:
    """A rollout that gets the group with the longest trajectory and `groups` - 1 others, from start to end."""
    batch = load.batch
    longest = int(batch.responses.max(axis=1).argmax())
    prompts = [longest, *(prompt for prompt in range(batch.groups) if prompt != longest)][:groups]
    engine = RooflineEngine(load.model, load.gpu, load.tensor_parallel, len(prompts) * batch.group_size, load.constants)
    for prompt in prompts:
        for member in range(batch.group_size):
            engine.add(
                0.0,
                f"{prompt}.{member}",
                prompt_tokens=batch.prompts[prompt],
                remaining_tokens=int(batch.responses[prompt, member]),
                pauses=batch.pauses[prompt][member],
                prefix_key=str(prompt),
            )
    now = 0.0
    while (event := engine.next_event(now)) is not None:
        now = event
        engine.advance(now)
    return now


def training_seconds(load: Load, trainer_gpus: int) -> float:
    """Estimate for one step, its publish included.

    Raises:
        UserError: the model cannot be trained on so few GPUs.
    """
    batch = load.batch
    trainer = TrainerModel(load.model, load.gpu, trainer_gpus, load.constants)
    lengths = (batch.responses + np.array(batch.prompts, np.int64)[:, None]).ravel()
    return trainer.step_seconds(np.array_split(lengths, load.mini_batches)) + trainer.publish_stall_seconds()


def shared(gpus: int, tensor_parallel: int) -> Split:
    """Rollouts and trainer take turns on all GPUs.

    Raises:
        UserError: the GPUs are not whole replicas.
    """
    if gpus % tensor_parallel:
        raise UserError(
            f"{gpus} GPUs are not whole rollouts of tensor_parallel {tensor_parallel}; take a multiple of it"
        )
    return Split(rollout_gpus=gpus, trainer_gpus=gpus)


def fixed(gpus: int, trainer: int | float, tensor_parallel: int) -> Split:
    """A number or a fraction of the GPUs for the trainer; a fraction is rounded so that the rest is whole rollouts.

    Raises:
        UserError: nothing is left for one side, or the rest is not whole rollouts.
    """
    if isinstance(trainer, float):
        replicas = round(gpus * (1 - trainer) / tensor_parallel)
        trainer_gpus = gpus - replicas * tensor_parallel
    else:
        trainer_gpus = trainer
    rollout_gpus = gpus - trainer_gpus
    if rollout_gpus < tensor_parallel:
        raise UserError(
            f"split: {trainer:g}; of {gpus} GPUs {trainer_gpus} train and {max(0, rollout_gpus)} are left, not enough for one "
            f"rollout of tensor_parallel {tensor_parallel}; give the trainer fewer GPUs"
        )
    if rollout_gpus % tensor_parallel:
        raise UserError(
            f"split: {trainer:g}; of {gpus} GPUs {trainer_gpus} train and {rollout_gpus} are left, not whole rollouts of "
            f"tensor_parallel {tensor_parallel}; change it by {rollout_gpus % tensor_parallel}"
        )
    return Split(rollout_gpus=rollout_gpus, trainer_gpus=trainer_gpus)


def balanced(load: Load, gpus: int) -> Split:
    """The split with the shortest step, which takes as long as the slower side: whole hosts for the trainer.

    On fewer than two hosts the trainer gets a multiple of `tensor_parallel` GPUs.

    Raises:
        UserError: too few GPUs for one rollout and a trainer that holds the model.
    """
    hosts = load.constants.gpus_per_host
    unit = hosts if gpus >= 2 * hosts else load.tensor_parallel
    possible: list[int] = []
    too_small: UserError | None = None
    for trainer_gpus in range(unit, gpus - load.tensor_parallel + 1, unit):
        if (gpus - trainer_gpus) % load.tensor_parallel:
            continue
        try:
            TrainerModel(load.model, load.gpu, trainer_gpus, load.constants)
        except UserError as error:
            too_small = error
        else:
            possible.append(trainer_gpus)
    if not possible:
        reason = str(too_small) if too_small else f"tensor_parallel is {load.tensor_parallel}, gpus_per_host {hosts}"
        raise UserError(f"{gpus} GPUs are too few for one rollout beside a trainer: {reason}")

    @cache
    def seconds(trainer_gpus: int) -> tuple[float, float]:
        replicas = (gpus - trainer_gpus) // load.tensor_parallel
        return generation_seconds(load, replicas), training_seconds(load, trainer_gpus)

    # More GPUs for the trainer make training faster and generation slower: the best is beside the crossing.
    crossing = bisect_left(possible, True, key=lambda one: seconds(one)[0] > seconds(one)[1])
    best = min(possible[max(0, crossing - 1) : crossing + 1], key=lambda one: max(seconds(one)))
    return Split(rollout_gpus=gpus - best, trainer_gpus=best)

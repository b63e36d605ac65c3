from __future__ import annotations

import pytest

from laminar.errors import UserError
from laminar.simulation.models.hardware import CONSTANTS, GPUS
from laminar.simulation.models.language_models import LANGUAGE_MODELS, kv_capacity
from laminar.simulation.models.lengths import LogNormalLengths
from laminar.simulation.models.workload import Workload
from laminar.simulation.study.split import (
    FirstBatch,
    Load,
    Split,
    balanced,
    default_tensor_parallel,
    fixed,
    generation_seconds,
    max_running,
    shared,
    training_seconds,
)
from tests.simulation.study_files import cases_of

H800 = GPUS["H800"]


def a_load(kind="draining", *, model="Qwen2.5-7B", degree=1, groups=128, under_way=5, median=500.0, p99=4000.0):
    workload = Workload(
        lengths=LogNormalLengths(median=median, p99=p99, maximum=8192),
        prompt_lengths=200,
        group_size=16,
        groups_per_step=groups,
        seed=1,
    )
    return Load(
        model=LANGUAGE_MODELS[model],
        gpu=H800,
        constants=CONSTANTS,
        tensor_parallel=degree,
        batch=FirstBatch(workload, groups, 16),
        mini_batches=4,
        kind=kind,
        batches_under_way=under_way,
    )


@pytest.mark.parametrize(("model", "degree"), [("Qwen2.5-7B", 1), ("Qwen2.5-32B", 4), ("Qwen2.5-72B", 8)])
def test_weights_leave_two_thirds_of_the_memory(model, degree):
    assert default_tensor_parallel(LANGUAGE_MODELS[model], H800, CONSTANTS) == degree


@pytest.mark.parametrize("kind", ["in_order", "draining", "always_full"])
@pytest.mark.parametrize("gpus", [16, 64, 256])
def test_no_other_split_of_whole_hosts_has_a_shorter_step(kind, gpus):
    load = a_load(kind, groups=64)

    def step_s(trainer_gpus):
        return max(training_seconds(load, trainer_gpus), generation_seconds(load, gpus - trainer_gpus))

    best = balanced(load, gpus).trainer_gpus
    assert best % 8 == 0
    assert step_s(best) == min(step_s(trainer_gpus) for trainer_gpus in range(8, gpus, 8))


def test_longer_responses_move_gpus_to_the_trainer_or_the_rollouts_but_never_lose_one():
    for p99 in (600.0, 4000.0, 8000.0):
        split = balanced(a_load(p99=p99), 64)
        assert split.rollout_gpus + split.trainer_gpus == 64


def test_on_one_host_the_trainer_gets_part_of_it():
    split = balanced(a_load(model="Qwen2.5-7B", degree=2), 8)
    assert split.trainer_gpus in (4, 6)
    assert split.rollout_gpus == 8 - split.trainer_gpus


def test_too_few_gpus_for_the_trainers_memory_are_refused_with_the_reason():
    with pytest.raises(UserError, match=r"16 GPUs are too few for one rollout beside a trainer: .*24 GPUs|22 GPUs"):
        balanced(a_load(model="Qwen2.5-72B", degree=8), 16)


def test_in_order_a_rollout_holds_its_share_of_the_batch():
    assert max_running(a_load("in_order"), 32) == 4 * 16
    assert max_running(a_load("in_order"), 100) == 2 * 16
    assert max_running(a_load("in_order"), 1000) == 16


def test_otherwise_it_holds_what_the_kv_cache_does():
    load = a_load(under_way=1e9)
    held = max_running(load, 4)
    capacity = kv_capacity(load.model, load.gpu, 1)
    assert held % 16 == 0
    assert held == 1024 or 0.8 * capacity < held * load.batch.kv_tokens_held <= 0.9 * capacity


def test_but_no_more_than_its_share_of_what_the_bound_lets_be_under_way():
    assert max_running(a_load(under_way=5), 128) == 5 * 16
    assert max_running(a_load(under_way=1), 128) == 16


def test_a_batch_in_order_takes_at_least_as_long_as_its_longest_trajectory():
    in_order, steady = a_load("in_order"), a_load("always_full", under_way=1e9)
    assert generation_seconds(in_order, 128) > 2 * generation_seconds(steady, 128)
    # Twice the rollouts do not make the longest one shorter.
    assert generation_seconds(in_order, 128) < 1.5 * generation_seconds(in_order, 256)


def test_draining_costs_time_against_rollouts_that_are_always_full():
    assert generation_seconds(a_load("draining"), 4) > 1.1 * generation_seconds(a_load("always_full"), 4)


def test_the_bound_on_staleness_is_a_floor_that_more_rollouts_do_not_lower():
    bounded, unbounded = a_load("always_full", under_way=2), a_load("always_full", under_way=1e9)
    assert generation_seconds(bounded, 500) > 2 * generation_seconds(unbounded, 500)
    assert generation_seconds(bounded, 1000) > 0.9 * generation_seconds(bounded, 500)


@pytest.mark.parametrize(
    ("trainer", "split"),
    [(24, Split(rollout_gpus=40, trainer_gpus=24)), (0.25, Split(rollout_gpus=48, trainer_gpus=16))],
)
def test_a_number_or_a_fraction_for_the_trainer(trainer, split):
    assert fixed(64, trainer, 4) == split


def test_a_fraction_leaves_whole_rollouts():
    assert fixed(64, 0.3, 8) == Split(rollout_gpus=48, trainer_gpus=16)


@pytest.mark.parametrize(("gpus", "trainer", "degree"), [(64, 64, 1), (64, 61, 4), (64, 0.99, 8), (64, 30, 4)])
def test_splits_without_whole_rollouts_are_refused(gpus, trainer, degree):
    with pytest.raises(UserError, match="split: "):
        fixed(gpus, trainer, degree)


def test_shared_gpus_are_whole_rollouts():
    assert shared(64, 8) == Split(rollout_gpus=64, trainer_gpus=64)
    with pytest.raises(UserError, match="30 GPUs are not whole rollouts of tensor_parallel 4"):
        shared(30, 4)


def test_a_bound_of_the_configs_own_is_taken(tmp_path):
    repack = "schedules=[{name: laminar, repack: true, max_running: 32}]"
    (fitted,), (own,), (too_large,) = (
        cases_of(tmp_path, repack, f"repack.batch_bound={bound}") for bound in ("null", "5", "64")
    )
    assert own.experiment.repack.batch_bound == 5
    assert too_large.experiment.repack.batch_bound == 32
    assert fitted.experiment.repack.batch_bound == "auto"
    assert fitted.experiment.rollout.delta_interval_s == 5.0 < cases_of(tmp_path)[0].experiment.rollout.delta_interval_s

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from laminar.weights.checkpoint_marker import MARKER, find_damage, read_marker
from laminar.weights.store import WeightStore
from laminar.weights.tensors import read_tensors
from laminar.workers.trainer.adapter_files import gather_adapters
from laminar.workers.trainer.checkpoint import load_checkpoint
from laminar.workers.trainer.publish import Publisher
from tests.workers.trainer.batches import largest_difference, parameters_of
from tests.workers.trainer.ranks_driver import steps_with, weights_of

ROOT = Path(__file__).parents[3]
STRATEGIES = ("data_parallel", "fsdp", "data_parallel-ppo", "fsdp-ppo")
OPTIONS = {"max_tokens_per_micro_batch": 60, "mini_batches": 2, "groups_per_step": 5}
GRPO = {"kl": {"coefficient": 0.1}}
PPO = {
    "advantage": "gae",
    "loss": "gspo",
    "clip_high": 0.3,
    "gae_lambda": 0.9,
    "kl": {"coefficient": 0.1, "apply_to": "reward"},
    "entropy_coefficient": 0.01,
}
LORA = {"rank": 3, "alpha": 6.0}  # a rank that two do not share evenly
LORA_STRATEGIES = ("data_parallel-lora", "fsdp-lora")
TIMES = {"forward_backward_s", "optimizer_s"}


def algorithm_of(strategy):
    return PPO if strategy.endswith("-ppo") else GRPO


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, model_folder):
    """What two ranks over gloo made of the same steps, with each strategy: one torchrun for all tests here."""
    from laminar.config.schema import ExperimentConfig

    folder = tmp_path_factory.mktemp("two-ranks")
    shared_memory = tmp_path_factory.mktemp("shared-memory")
    for strategy in (*STRATEGIES, *LORA_STRATEGIES):
        config = ExperimentConfig.model_validate(
            {
                "name": "test",
                "model": {"path": str(model_folder)},
                "data": {"source": {"type": "jsonl", "path": "unused.jsonl"}},
                "trainer": {
                    **OPTIONS,
                    "steps": 10,
                    "group_size": 4,
                    "ranks": 2,
                    "strategy": strategy.partition("-")[0],
                    "lora": LORA if strategy in LORA_STRATEGIES else None,
                    "optimizer": {"learning_rate": 1e-3},
                },
                "algorithm": algorithm_of(strategy),
            }
        )
        (folder / strategy).mkdir()
        (folder / f"{strategy}.json").write_text(config.model_dump_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(Path(__file__).with_name("ranks_driver.py")), str(folder), str(shared_memory)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return folder, shared_memory


@pytest.fixture
def results(two_ranks):
    """strategy -> what each of the two ranks noted."""
    folder, _ = two_ranks
    return {
        strategy: [json.loads((folder / strategy / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        for strategy in STRATEGIES
    }


@pytest.fixture
def one_rank(make_actor, strategy):
    """The same steps on one rank, in one micro-batch."""
    actor = make_actor(**OPTIONS | {"max_tokens_per_micro_batch": 10_000}, algorithm=algorithm_of(strategy))
    metrics = steps_with(actor)
    return weights_of(actor), metrics


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_equal_those_of_one_rank(two_ranks, one_rank, strategy):
    weights = load_file(two_ranks[0] / strategy / "weights.safetensors")
    assert largest_difference(weights, one_rank[0]) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metrics_equal_those_of_one_rank_on_every_rank(results, one_rank, strategy):
    first, second = results[strategy]
    assert first["metrics"] == second["metrics"]
    for ours, theirs in zip(first["metrics"], one_rank[1], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - TIMES - {"micro_batches", "padded_fraction"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    # The second step has one group: one mini-batch, and too few rows to fill both ranks alike.
    assert first["metrics"][0]["micro_batches"] > 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_published_tensors_are_the_trained_ones(two_ranks, model_folder, strategy):
    folder, shared_memory = two_ranks
    store = WeightStore("run", strategy, base=shared_memory)
    assert store.versions() == [0, 1]
    start = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    assert "lm_head.weight" in start
    for policy_version, expected in ((0, start), (1, load_file(folder / strategy / "weights.safetensors"))):
        published = dict(read_tensors(store.path(policy_version)))
        policy = {name for name in expected if not name.startswith("critic.")}
        assert published.keys() == policy - {"lm_head.weight"}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in published.items())


def test_strategies_say_what_runs(results):
    assert "2 ranks, data_parallel (DistributedDataParallel over gloo)" in results["data_parallel"][0]["description"]
    assert "2 ranks, fsdp (fully_shard over gloo)" in results["fsdp"][0]["description"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoint_of_two_ranks(two_ranks, results, make_actor, strategy):
    for result in results[strategy]:
        assert result["checkpoint_error"] == ""
        assert result["restored"]
        assert result["next_step_equal"]
        assert result["damage"].endswith("trainer/__1_0.distcp has another checksum than it was written with")
    written = two_ranks[0] / strategy / "checkpoint"
    marker = read_marker(written)
    files = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
    assert set(marker.files) == files - {MARKER}
    assert "trainer/__1_0.distcp" in files, "one rank has written all"
    assert find_damage(written, marker.files) == ""
    # It can be loaded on one rank too, and its Hugging Face folder holds the same weights.
    folder = two_ranks[0] / strategy / "checkpoint"
    actor = make_actor(algorithm=algorithm_of(strategy))
    load_checkpoint(actor, folder)
    exported = AutoModelForCausalLM.from_pretrained(folder / "huggingface")
    assert largest_difference(parameters_of(actor), dict(exported.named_parameters())) == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_ranks_tell_why_a_checkpoint_failed(two_ranks, results, strategy):
    for result in results[strategy]:
        assert "refused was not written: not enough space on the disk; " in result["refused_error"]
        assert "limited was not written: the trainer's state: " in result["limited_error"]
    assert not list((two_ranks[0] / strategy).glob("*refused*"))
    assert not list((two_ranks[0] / strategy).glob("*limited*"))


@pytest.mark.parametrize("strategy", LORA_STRATEGIES)
def test_adapters_on_two_ranks_equal_those_of_one(two_ranks, make_actor, shared_memory, strategy):
    """What is trained, the KL to the base model, what is published, and what a checkpoint restores."""
    folder, published = two_ranks[0] / strategy, two_ranks[1]
    first, second = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    actor = make_actor(**OPTIONS | {"max_tokens_per_micro_batch": 10_000}, algorithm=GRPO, lora=LORA)
    metrics = steps_with(actor)
    assert largest_difference(load_file(folder / "weights.safetensors"), weights_of(actor)) < 1e-5
    assert first["metrics"] == second["metrics"]
    for ours, theirs in zip(first["metrics"], metrics, strict=True):
        assert ours["kl_reference"] == pytest.approx(theirs["kl_reference"], rel=1e-3, abs=1e-6)
    assert first["metrics"][1]["kl_reference"] > 0
    store = WeightStore("run", "one-rank", base=shared_memory)
    Publisher(actor, store).publish(1)
    mine = dict(read_tensors(store.path(1)))
    theirs = dict(read_tensors(WeightStore("run", strategy, base=published).path(1)))
    assert largest_difference(mine, theirs) < 1e-5
    for result in (first, second):
        assert (result["checkpoint_error"], result["restored"], result["next_step_equal"]) == ("", True, True)
    other = make_actor(lora=LORA)
    load_checkpoint(other, folder / "checkpoint")
    adapters = load_file(folder / "checkpoint" / "adapter" / "adapter_model.safetensors")
    assert adapters and largest_difference(adapters, gather_adapters(other.model, keep=True)) == 0

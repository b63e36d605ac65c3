from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from laminar.errors import UserError
from laminar.weights import store as store_module
from laminar.weights.store import WeightStore
from laminar.weights.tensors import read_tensors
from laminar.workers.trainer import publish as publish_module
from laminar.workers.trainer.lora import gathered_weights
from laminar.workers.trainer.publish import Publisher
from tests.tiny_models import make_model
from tests.workers.trainer.batches import random_step
from tests.workers.trainer.test_staging import LateLane

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_published_bytes_are_the_state_dict(make_actor, shared_memory, tmp_path, dtype, tied):
    actor = make_actor(path=make_model(tmp_path, seed=3, tied=tied), dtype=dtype)
    store = WeightStore("run", "relay-0", base=shared_memory)
    publisher = Publisher(actor, store)
    for policy_version in (0, 1):
        published = publisher.publish(policy_version)
        assert store.newest() == policy_version
        state = actor.model.state_dict()
        if tied:
            assert torch.equal(state.pop("lm_head.weight"), state["model.embed_tokens.weight"])
        stored = dict(read_tensors(store.path(policy_version)))
        assert list(stored) == list(state)
        for name, tensor in state.items():
            assert stored[name].dtype == getattr(torch, dtype)
            assert torch.equal(stored[name], tensor.to(stored[name].dtype)), name
        assert published.nbytes >= sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
        assert published.seconds > 0
        actor.train_step(random_step())
    old = dict(read_tensors(store.path(0)))
    assert any(not torch.equal(old[name], stored[name]) for name in stored)


def test_version_is_never_written_twice(make_actor, shared_memory):
    """A controller that has taken another's place may ask again for what was published."""
    store = WeightStore("run", "relay-0", base=shared_memory)
    publisher = Publisher(make_actor(), store)
    publisher.publish(4)
    written = store.path(4).stat()
    assert publisher.publish(4).nbytes == publisher.layout.total_bytes
    again = store.path(4).stat()
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_full_shared_memory_is_a_clear_error(make_actor, shared_memory, monkeypatch):
    publisher = Publisher(make_actor(), WeightStore("run", "relay-0", base=shared_memory))

    def too_small(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.os, "posix_fallocate", too_small)
    with pytest.raises(UserError, match="shared memory too small"):
        publisher.publish(0)
    assert list((shared_memory / "laminar-run" / "relay-0").iterdir()) == []


def test_weights_are_laid_out_for_the_largest_degree(make_actor, shared_memory, monkeypatch):
    actor = make_actor()
    rollout = actor.config.rollout.model_copy(update={"tensor_parallel": [2, 1], "replicas": 2})
    actor.config = actor.config.model_copy(update={"rollout": rollout})
    store = WeightStore("run", "relay-0", base=shared_memory)
    publisher = Publisher(actor, store)
    sharded = {entry.name for entry in publisher.layout.entries if entry.shards == 2}
    assert sharded == {
        f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    publisher.publish(0)
    state = actor.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in read_tensors(store.path(0)))


def test_a_gpu_publishes_the_same_bytes_through_staging_buffers(make_actor, shared_memory):
    actor = make_actor(dtype="bfloat16")
    store = WeightStore("run", "relay-0", base=shared_memory)
    publisher = Publisher(actor, store)
    publisher.publish(0)
    publisher._staging = publish_module.Staging(LateLane(), 1000)
    publisher.publish(1)
    assert bytes(store.open(0).buffer) == bytes(store.open(1).buffer)


def test_an_error_while_gathering_leaves_nothing_under_way(make_actor, shared_memory, monkeypatch):
    def with_unknown(model):
        yield from gathered_weights(model)
        yield "unknown", torch.ones(3)

    monkeypatch.setattr(publish_module, "gathered_weights", with_unknown)
    publisher = Publisher(make_actor(), WeightStore("run", "relay-0", base=shared_memory))
    lane = LateLane()
    publisher._staging = publish_module.Staging(lane, 1000)
    with pytest.raises(ValueError, match="'unknown'"):
        publisher.publish(0)
    assert lane.most > 0
    assert lane.under_way == []
    assert list((shared_memory / "laminar-run" / "relay-0").iterdir()) == []


def test_the_trainer_lets_old_versions_go(make_actor, shared_memory):
    store = WeightStore("run", "relay-0", base=shared_memory)
    publisher = Publisher(make_actor(), store, keep=2)
    for policy_version in range(4):
        publisher.publish(policy_version)
    assert store.versions() == [0, 1, 2, 3]
    publisher.prepare()
    assert store.versions() == [2, 3]


def test_a_sharded_model_is_never_in_memory_as_a_whole(shared_memory, tmp_path):
    """Of the gathered tensors, each of two ranks holds one at a time; gloo's thread may let go of the one before a little later."""
    model = make_model(tmp_path / "model", seed=0, layers=2, hidden=128)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    driver = Path(__file__).with_name("publish_driver.py")
    result = subprocess.run(
        [*command, str(driver), str(model), str(tmp_path), str(shared_memory)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    for rank in (0, 1):
        figures = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert figures["published_bytes"] > 5 * figures["largest_bytes"]
        assert figures["peak_bytes"] <= 2 * figures["largest_bytes"]

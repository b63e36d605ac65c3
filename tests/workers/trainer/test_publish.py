from __future__ import annotations

import pytest
import torch

from laminar.errors import UserError
from laminar.weights import store as store_module
from laminar.weights.store import WeightStore
from laminar.weights.tensors import read_tensors
from laminar.workers.trainer.publish import Publisher
from tests.tiny_models import make_model
from tests.workers.trainer.batches import random_step


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
    publisher = Publisher(make_actor(), WeightStore("run", "relay-0", base=shared_memory))
    publisher.publish(4)
    with pytest.raises(FileExistsError, match="version 4"):
        publisher.publish(4)


def test_full_shared_memory_is_a_clear_error(make_actor, shared_memory, monkeypatch):
    publisher = Publisher(make_actor(), WeightStore("run", "relay-0", base=shared_memory))

    def too_small(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.os, "posix_fallocate", too_small)
    with pytest.raises(UserError, match="shared memory too small"):
        publisher.publish(0)
    assert list((shared_memory / "laminar-run" / "relay-0").iterdir()) == []

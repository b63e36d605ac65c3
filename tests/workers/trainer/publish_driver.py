"""Run by torchrun: publish a sharded model, and note how much of what was gathered was in memory at one moment.

torchrun --nproc-per-node 2 publish_driver.py MODEL FOLDER SHARED_MEMORY   (writes FOLDER/rank-<rank>.json)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from laminar.config.schema import ExperimentConfig
from laminar.weights.store import WeightStore
from laminar.workers.trainer import lora as lora_module
from laminar.workers.trainer.actor import Actor
from laminar.workers.trainer.parallel import full_tensor
from laminar.workers.trainer.publish import Publisher
from laminar.workers.trainer.ranks import Ranks


class Gatherer:
    """`full_tensor` that knows which of its results still have their memory."""

    def __init__(self) -> None:
        self._results: list[tuple[StorageWeakRef, int]] = []
        self.peak_bytes = 0

    def full_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        result = full_tensor(tensor)
        assert result is not tensor
        self._results.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
        held = sum(nbytes for storage, nbytes in self._results if not storage.expired())
        self.peak_bytes = max(self.peak_bytes, held)
        return result


def main() -> None:
    model, folder, shared_memory = map(Path, sys.argv[1:])
    config = ExperimentConfig.model_validate(
        {
            "name": "test",
            "model": {"path": str(model)},
            "data": {"source": {"type": "jsonl", "path": "unused.jsonl"}},
            "rollout": {"tensor_parallel": 2},
            "trainer": {"steps": 1, "groups_per_step": 4, "group_size": 4, "ranks": 2, "strategy": "fsdp"},
        }
    )
    ranks = Ranks(config)
    publisher = Publisher(
        Actor(config, ranks), WeightStore("run", "relay-0", base=shared_memory) if ranks.rank == 0 else None
    )
    gatherer = Gatherer()
    with patch.object(lora_module, "full_tensor", gatherer.full_tensor):
        publisher.publish(0)
    figures = {
        "peak_bytes": gatherer.peak_bytes,
        "largest_bytes": max(entry.nbytes for entry in publisher.layout.entries),
        "published_bytes": publisher.layout.total_bytes,
    }
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

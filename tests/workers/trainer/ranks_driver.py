"""Run by torchrun: the same steps with each strategy, and what came out of them in a folder per strategy.

torchrun --nproc-per-node 2 ranks_driver.py FOLDER   (FOLDER/<strategy>.json hold the configs)
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file

from laminar.config.schema import ExperimentConfig
from laminar.errors import DamagedCheckpoint
from laminar.protocol.messages import SaveCheckpoint
from laminar.weights.store import WeightStore
from laminar.workers.trainer import checkpoint as checkpoint_module
from laminar.workers.trainer.actor import Actor
from laminar.workers.trainer.checkpoint import load_checkpoint, save_checkpoint
from laminar.workers.trainer.critic import named_state
from laminar.workers.trainer.model_loading import named_weights
from laminar.workers.trainer.parallel import full_tensor
from laminar.workers.trainer.publish import Publisher
from laminar.workers.trainer.ranks import Ranks
from tests.workers.trainer.batches import random_step


def weights_of(actor):
    """The actor's weights by name, and the critic's after `critic.`."""
    weights = dict(named_weights(actor.model))
    if actor.critic is not None:
        weights |= {f"critic.{name}": tensor for name, tensor in named_state(actor.critic).items()}
    return {name: full_tensor(tensor).clone().contiguous() for name, tensor in weights.items()}


def steps_with(actor):
    """SGD for rounding errors to stay as small as they are; then AdamW, which the checkpoint is to hold."""
    trained = [actor] if actor.critic is None else [actor, actor.critic]
    adams = [part.optimizer for part in trained]
    for part in trained:
        part.optimizer = torch.optim.SGD(part.parameters, lr=1.0)
    metrics = [actor.train_step(random_step(1, groups=5, seed=11)), actor.train_step(random_step(2, groups=1, seed=12))]
    for part, adam in zip(trained, adams, strict=True):
        part.optimizer = adam
    return metrics


def load_damaged(actor: Actor, checkpoint: Path) -> str:
    """What this rank says of a checkpoint with a damaged file, which only one of them reads; the file is mended afterwards."""
    file = checkpoint / "trainer" / "__1_0.distcp"
    content = file.read_bytes()
    actor.ranks.first_error("")  # all have read it
    if actor.ranks.rank == 0:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    actor.ranks.first_error("")
    try:
        load_checkpoint(actor, checkpoint)
        return ""
    except DamagedCheckpoint as error:
        return str(error)
    finally:
        actor.ranks.first_error("")
        if actor.ranks.rank == 0:
            file.write_bytes(content)


def run(config: ExperimentConfig, folder: Path, shared_memory: Path) -> None:
    ranks = Ranks(config)
    actor = Actor(config, ranks)
    publisher = Publisher(actor, WeightStore("run", folder.name, base=shared_memory) if ranks.rank == 0 else None)
    publisher.publish(0)
    metrics = steps_with(actor)
    publisher.publish(1)
    result = {"metrics": metrics, "description": actor.describe()}
    after_sgd = weights_of(actor)
    actor.train_step(random_step(3))
    order = SaveCheckpoint(order=1, step=3, policy_version=1, path=str(folder / "checkpoint"), state="{}")
    result["checkpoint_error"] = save_checkpoint(actor, order).error
    at_save = weights_of(actor)
    actor.train_step(random_step(4))
    after = weights_of(actor)
    load_checkpoint(actor, order.path)
    result["restored"] = all(torch.equal(at_save[name], tensor) for name, tensor in weights_of(actor).items())
    actor.train_step(random_step(4))
    result["next_step_equal"] = all(torch.equal(after[name], tensor) for name, tensor in weights_of(actor).items())
    result["damage"] = load_damaged(actor, Path(order.path))
    order = SaveCheckpoint(order=1, step=4, policy_version=1, path=str(folder / "refused"), state="{}")
    with patch.object(checkpoint_module, "free_bytes", lambda _: 0 if ranks.rank == 0 else 10**12):
        result["refused_error"] = save_checkpoint(actor, order).error
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:  # the disk of one rank fills up in the middle
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    order = SaveCheckpoint(order=1, step=4, policy_version=1, path=str(folder / "limited"), state="{}")
    result["limited_error"] = save_checkpoint(actor, order).error
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(result))
    if ranks.rank == 0:
        save_file(after_sgd, folder / "weights.safetensors")
    AcceleratorState._reset_state(reset_partial_state=True)


def main() -> None:
    folder, shared_memory = Path(sys.argv[1]), Path(sys.argv[2])
    for path in sorted(folder.glob("*.json")):
        run(ExperimentConfig.model_validate_json(path.read_text()), folder / path.stem, shared_memory)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

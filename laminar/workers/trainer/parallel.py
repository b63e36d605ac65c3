"""How the model lies on the ranks: whole on each (DDP, by accelerate), or sharded (torch's fully_shard).

Accelerate does not shard on CPU (it takes an FSDP plugin and runs data parallel without a word), hence fully_shard.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from laminar.workers.trainer.ranks import Ranks
from laminar.workers.trainer.scoring_model import ScoringModel
from laminar.workers.trainer.value_model import ValueModel

Strategy = Literal["data_parallel", "fsdp"]


def distribute(model: ScoringModel | ValueModel, ranks: Ranks, strategy: Strategy, *, trained: bool) -> nn.Module:
    """A model on this rank's device, in the wrapping of the strategy; call what is returned, not `model`.

    Mixed precision comes in here too: accelerate runs the forward pass under autocast, the parameters stay float32.
    """
    sharded = strategy == "fsdp" and ranks.size > 1
    if sharded:
        _shard(model, ranks)
    # "Evaluation mode" leaves DDP out and nothing else.
    prepared: nn.Module = ranks.accelerator.prepare_model(
        model, device_placement=not sharded, evaluation_mode=sharded or not trained or ranks.size == 1
    )
    return prepared


def describe(ranks: Ranks, strategy: Strategy) -> str:
    """What really runs, for a person."""
    if ranks.size == 1:
        return "1 rank"
    kind = "fully_shard" if strategy == "fsdp" else "DistributedDataParallel"
    return f"{ranks.size} ranks, {strategy} ({kind} over {torch.distributed.get_backend()})"


def accumulating(module: nn.Module, ranks: Ranks, *, last: bool) -> AbstractContextManager[None]:
    """Around the backward pass of a micro-batch: DDP sums gradients over ranks only in the last one.

    A sharded model reduces in every pass: putting it off would keep the whole model's gradients on each rank.
    """
    if last or ranks.size == 1 or isinstance(module, FSDPModule):
        return contextlib.nullcontext()
    return ranks.accelerator.no_sync(module)  # type: ignore[no-any-return]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, detached; a collective when it is sharded, the tensor itself when not."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reshard(module: nn.Module) -> None:
    """After a pass without backward: drop the gathered parameters, which the next update would leave stale."""
    if isinstance(module, FSDPModule):
        module.reshard()


def _shard(model: ScoringModel | ValueModel, ranks: Ranks) -> None:
    """Shard layer by layer, then the rest (embeddings, norm, head: together, since they may be tied)."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    layer_classes = set(model.model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in layer_classes:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to(ranks.device)

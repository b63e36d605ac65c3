"""Low-rank adapters beside frozen weights (Hu et al. 2021, arXiv 2106.09685), by peft.

Invariants: the plain Hugging Face model stays what it is, with its own names; what is published is W + alpha / rank * B A,
computed in float32 tensor by tensor and rounded once; without its adapters the model is the one that training started from.

peft takes seconds to import, and is imported only where adapters are asked for.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from laminar.config.schema import LoraConfig
from laminar.errors import UserError
from laminar.workers.trainer.model_loading import named_weights
from laminar.workers.trainer.parallel import full_tensor, reshard

ADAPTER = "default"  # peft's name for the one that there is
KEY = "trainer.lora.target_modules"


def add_adapters(model: PreTrainedModel, lora: LoraConfig, model_path: str, *, seed: int) -> None:
    """Freeze the model and put adapters beside its linear layers, in place. At first they change nothing.

    Args:
        model: on the CPU, not yet distributed; every rank gets the same adapters.
        model_path: of the base model; noted in what is saved.
        seed: of the adapters' first values.

    Raises:
        UserError: a target names no linear layer of the model.
    """
    import peft

    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_target_names(model, lora),
        base_model_name_or_path=str(Path(model_path).resolve()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # master parameters, whatever the base is held in


def _target_names(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Names by which peft finds exactly the layers that are meant: last parts where these are enough."""
    head = model.get_output_embeddings()
    linear = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    if lora.target_modules == "all-linear":
        chosen = linear
    else:
        chosen = [name for name in linear if any(_ends_with(name, target) for target in lora.target_modules)]
        for target in lora.target_modules:
            if not any(_ends_with(name, target) for name in linear):
                known = sorted({_last(name) for name in linear})
                near = difflib.get_close_matches(target, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise UserError(
                    f"{KEY}: {target}: no linear layer of {type(model).__name__} has a name that ends so (the output layer is "
                    f"none of them); {hint}"
                )
    ends = sorted({_last(name) for name in chosen})
    return ends if len(chosen) == sum(_last(name) in ends for name in linear) else chosen


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by the name of the module that they stand for; empty for a model without adapters."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict)
    }


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one that training started from."""
    layers = adapted_layers(model).values()
    # peft's own enable_adapters also takes the adapters' gradients away, which DDP and fully_shard do not expect.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class WithoutAdapters(nn.Module):
    """A model with adapters, used as the one that training started from; called like what it wraps."""

    def __init__(self, wrapped: nn.Module, model: nn.Module) -> None:
        """`wrapped`: what is called; `model`: the one inside of it that has the adapters."""
        super().__init__()
        self._wrapped = wrapped
        self._model = model

    def forward(self, *arguments: torch.Tensor) -> Any:
        """What `wrapped` gives without adapters. It leaves no gathered parameters behind."""
        with adapters_off(self._model):
            result = self._wrapped(*arguments)
        reshard(self._wrapped)
        return result


@contextlib.contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Inside, adapters have no dropout: the model is what is published."""
    modules = [
        module
        for layer in adapted_layers(model).values()
        for module in layer.lora_dropout.modules()
        if isinstance(module, nn.Dropout)
    ]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()


def published_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is published, by Hugging Face names, each tensor once; where there is an adapter, the frozen weight alone."""
    adapters = tuple(f"{name}.lora_" for name in adapted_layers(model))
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in named_weights(model).items()
        if not name.startswith(adapters)
    }


def gathered_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each of `published_weights` whole and with its adapter merged in, one at a time; a collective where they are sharded."""
    layers = adapted_layers(model)
    for name, tensor in published_weights(model).items():
        whole = full_tensor(tensor)
        layer = layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if layer is not None:
            whole = _merged(whole, layer)
        yield name, whole
        del whole  # before the next one is gathered


def _merged(whole: torch.Tensor, layer: Any) -> torch.Tensor:
    """W + alpha / rank * B A in float32. A collective where the adapter is sharded."""
    low = full_tensor(layer.lora_A[ADAPTER].weight).float()  # [rank, in]
    high = full_tensor(layer.lora_B[ADAPTER].weight).float()  # [out, rank]
    product = high @ low
    return torch.add(whole.float(), product.T if layer.fan_in_fan_out else product, alpha=layer.scaling[ADAPTER])

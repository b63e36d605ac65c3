"""Adapters as files: a folder that peft and transformers load, and that vLLM serves beside its base model.

adapter_config.json        rank, alpha, targets, and where the base model is
adapter_model.safetensors  A and B of every layer, in float32
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from laminar.errors import UserError
from laminar.workers.trainer.lora import ADAPTER
from laminar.workers.trainer.parallel import full_tensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's, before the model's own names

# What has to be the same for adapters to mean the same: peft's key -> the config's.
SAME = {"r": "trainer.lora.rank", "lora_alpha": "trainer.lora.alpha", "base_model_name_or_path": "model.path"}


def gather_adapters(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """All of A and B on the CPU, by peft's names, if `keep`; else nothing. A collective where they are sharded."""
    adapters: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = full_tensor(parameter)
            if keep:
                adapters[PREFIX + name.replace(f".{ADAPTER}.", ".")] = whole.cpu().contiguous()
    return adapters


def write_adapter(model: PreTrainedModel, adapters: dict[str, torch.Tensor], folder: Path) -> None:
    """The folder of the module's text."""
    folder.mkdir()
    _config_of(model).save_pretrained(folder)
    save_file(adapters, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def check_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Refuse to go on with adapters that mean something else under this config.

    Raises:
        UserError: no adapters there, or of another rank, alpha or base model.
    """
    written = read_adapter_config(folder)
    config = _config_of(model)
    for theirs, ours in SAME.items():
        value = getattr(config, theirs)
        if written.get(theirs) != value:
            raise UserError(f"{folder}: these adapters were trained with {ours} {written.get(theirs)}, not {value}")


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Contents of adapter_config.json. Raises UserError where there is none."""
    try:
        content: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder}: holds no adapters: {CONFIG_FILE} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{folder / CONFIG_FILE} is damaged: {error}") from error
    return content


def _config_of(model: PreTrainedModel) -> Any:
    return model.peft_config[ADAPTER]

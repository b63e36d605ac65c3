"""Model and tokenizer from a Hugging Face folder. Invariant: a model that comes out has every one of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from laminar.errors import UserError


def load_model(path: str, key: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal language model in a folder, on the CPU, with its dropout off.

    Args:
        path: the folder.
        key: config key that named it, for messages ("model.path").
        dtype: what the weights are held in.

    Raises:
        UserError: no such folder, not a causal language model, or weights missing or damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{key}: no such folder: {path}. Give a folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}: {path} has no config.json, so it is not a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{key}: {path}/config.json describes no known model: {_first_line(error)}") from error
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    architectures = config.architectures or []
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (
        architectures and causal.isdisjoint(architectures)
    ):
        raise UserError(
            f"{key}: {path} is not a causal language model: its architecture is "
            f"{', '.join(architectures) or config.model_type}. Expected one such as Qwen3ForCausalLM"
        )
    auto: Any = AutoModelForCausalLM
    try:
        model, loading = auto.from_pretrained(
            path, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # safetensors and pickles raise many kinds; all mean that the files are no good
        raise UserError(f"{key}: the weights in {path} cannot be loaded: {_first_line(error)}") from error
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"{key}: {path} lacks {len(missing)} of the model's weights (first: {missing[0]}); is it a whole copy?"
        )
    switch_off_dropout(model)
    loaded: PreTrainedModel = model
    return loaded


def load_tokenizer(path: str, key: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a model folder. Raises UserError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # many kinds, by tokenizer class
        raise UserError(f"{key}: no tokenizer can be loaded from {path}: {_first_line(error)}") from error


def switch_off_dropout(model: nn.Module) -> None:
    """Make training mode deterministic: ratios and logprobs would otherwise hold the noise of two dropout masks."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under their Hugging Face names, each tensor once (a tied head is left out).

    The tensors are the model's own (DTensors when it is sharded).
    """
    weights: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    state: dict[str, Any] = model.state_dict(keep_vars=True)  # the parameters themselves, so that ties show
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor
    return weights


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: dict[str, torch.Tensor],
    dtype: str,
    folder: Path,
) -> None:
    """A folder that `AutoModelForCausalLM.from_pretrained` loads, with these weights ("float32" or "bfloat16")."""
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    # save_pretrained notes the type of the master parameters, not of the weights that it was given.
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = dtype
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

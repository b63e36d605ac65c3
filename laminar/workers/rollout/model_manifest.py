"""What tensors a version must hold for a model: names, dtypes and shapes, as the trainer publishes them.

Invariant: a version that is not the model's is refused before the engine is touched, which goes on with what it had.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from laminar.weights.tensors import dtype_name
from laminar.weights.version_file import VersionReader

Manifest = Mapping[str, tuple[str, tuple[int, ...]]]  # Hugging Face name -> (dtype, shape)


def model_manifest(model: nn.Module, dtype: torch.dtype) -> Manifest:
    """The tensors of a Hugging Face model, tied ones once; floating-point ones in the dtype that is published."""
    seen: set[int] = set()
    manifest: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():  # the parameters themselves, so that ties show
        if id(tensor) not in seen:
            seen.add(id(tensor))
            stored = dtype if tensor.is_floating_point() else tensor.dtype
            manifest[name] = (dtype_name(stored), tuple(tensor.shape))
    return manifest


def manifest_of_folder(model_path: str, dtype: str) -> Manifest:
    """The manifest of a model folder's causal language model, from its config.json alone.

    Raises:
        OSError, ValueError: no such folder, or not a causal language model.
    """
    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model_manifest(model, getattr(torch, dtype))


def check_manifest(path: str, manifest: Manifest) -> None:
    """Refuse a version file that is not of this model.

    Raises:
        FileNotFoundError: no such file (any more).
        ValueError: not a weight file, or another model's; names the first tensors that differ.
    """
    with VersionReader(path) as reader:
        mismatch = reader.layout.mismatch(manifest)
    if mismatch is not None:
        raise ValueError(
            f"{path} is not this model's weights: {mismatch}; the trainer and the rollouts must use the same model.path "
            "and model.dtype"
        )

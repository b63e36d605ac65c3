"""What a model folder says about itself, read from JSON alone: no torch, no transformers, no weights in memory.

Invariant: a folder that `read_model_folder` accepts looks like a Hugging Face causal language model that can be loaded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from laminar.errors import UserError
from laminar.weights.layout import ALIGNMENT

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelShape:
    """The sizes that memory and context depend on. None: the folder does not say."""

    architecture: str
    context_tokens: int | None
    layers: int | None
    attention_heads: int | None
    kv_heads: int | None
    head_dim: int | None
    tensor_sizes: tuple[int, ...] | None  # number of weights in each tensor, without a tied lm_head

    def kv_bytes_per_token(self, dtype: str) -> int | None:
        """Bytes that one token takes in the KV cache, over all layers and heads."""
        if self.layers is None or self.kv_heads is None or self.head_dim is None:
            return None
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def weight_bytes(self, dtype: str) -> int | None:
        """Bytes of one weight version, each tensor at the alignment that the weight layout gives it."""
        if self.tensor_sizes is None:
            return None
        return sum(-(-size * DTYPE_BYTES[dtype] // ALIGNMENT) * ALIGNMENT for size in self.tensor_sizes)


def read_model_folder(path: Path, key: str) -> ModelShape:
    """Read config.json and the headers of the safetensors files.

    Args:
        path: the folder.
        key: the configuration key that names it, for messages.

    Raises:
        UserError: no folder, or not that of a causal language model.
    """
    remedy = "give the folder of a Hugging Face causal LM, or make the tiny one: python scripts/make_tiny_model.py"
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        raise UserError(f"{key}: {path}: {what} (working directory: {Path.cwd()}); {remedy}")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{key}: {path}: holds no config.json, so it is no model; {remedy}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path}/config.json: cannot be read as JSON ({error}); {remedy}") from None
    architectures = config.get("architectures") if isinstance(config, dict) else None
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    causal = next((name for name in names if name.endswith("ForCausalLM")), None)
    if causal is None:
        said = ", ".join(names) or "nothing"
        raise UserError(f"{key}: {path}: config.json names {said}; expected an architecture ...ForCausalLM; {remedy}")
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise UserError(f"{key}: {path}: holds no weights (*.safetensors); was the download cut off? {remedy}")
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserError(f"{key}: {path}: holds no tokenizer (tokenizer.json); copy the model's own tokenizer there")
    return _shape(causal, config, path)


def _shape(architecture: str, config: Mapping[str, Any], path: Path) -> ModelShape:
    text = config.get("text_config")  # multimodal models keep the language model's sizes in there
    sizes = text if isinstance(text, Mapping) else config

    def size(*names: str) -> int | None:
        return next((sizes[name] for name in names if type(sizes.get(name)) is int and sizes[name] > 0), None)

    heads, hidden = size("num_attention_heads", "n_head"), size("hidden_size", "n_embd")
    return ModelShape(
        architecture=architecture,
        context_tokens=size("max_position_embeddings", "n_positions"),
        layers=size("num_hidden_layers", "n_layer"),
        attention_heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        head_dim=size("head_dim") or (hidden // heads if hidden and heads else None),
        tensor_sizes=_tensor_sizes(path, tied=sizes.get("tie_word_embeddings", True) is True),
    )


def _tensor_sizes(path: Path, *, tied: bool) -> tuple[int, ...] | None:
    """Number of weights in each tensor of the safetensors files; None where there are none, or a damaged one (loading will say so)."""
    files = sorted(path.glob("*.safetensors"))
    shapes: dict[str, list[int]] = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(length)) if length <= MAX_HEADER_BYTES else {}
            shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, struct.error, AttributeError, KeyError, TypeError):
            return None
    if tied:
        shapes.pop("lm_head.weight", None)
    return tuple(prod(shape) for shape in shapes.values()) or None

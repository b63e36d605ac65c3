"""A valid config file to spoil in one place, and a model folder made of nothing but headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

VALID = """\
name: example
model: {path: MODEL}
data:
  source:
    type: reasoning_gym
    datasets:
      - {name: spell_backward, params: {min_word_len: 3}}
  max_prompt_tokens: 100
rollout: {engine: torch, max_response_tokens: 100}
trainer: {steps: 3, groups_per_step: 4, group_size: 4}
launch: {trainer: manual, relays: manual, rollouts: manual, environments: manual}
"""

MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "max_position_embeddings": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Config, tokenizer, and a safetensors file of 2 x 3 weights and a tied lm_head whose data nobody reads."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_model_config(folder)
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", {"embed.weight": [2, 3], "lm_head.weight": [2, 3]})
    return folder


@pytest.fixture
def config_file(tmp_path: Path, model_folder: Path) -> Path:
    path = tmp_path / "example.yaml"
    path.write_text(VALID.replace("MODEL", str(model_folder)))
    return path


def write_model_config(folder: Path, **changes: object) -> None:
    values = {key: value for key, value in (MODEL_CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)

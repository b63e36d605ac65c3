from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, Qwen3Config

from laminar.workers.trainer.model_loading import named_weights
from laminar.workers.trainer.tensor_parallel_plan import column_shards


def shards_of(config, degree):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return column_shards(model, named_weights(model), degree)


QWEN = Qwen3Config(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=11,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
)


def test_the_plan_names_what_is_split_by_columns():
    expected = {
        f"model.layers.{layer}.{name}.weight": 2
        for layer in range(11)
        for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    assert shards_of(QWEN, 2) == expected
    assert shards_of(QWEN, 1) == {}


def test_what_the_degree_does_not_divide_stays_plain():
    assert set(shards_of(QWEN, 64)) == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(11)}


def test_an_architecture_without_a_plan_stays_plain_and_is_noted(caplog):
    with caplog.at_level("INFO", logger="laminar.trainer"):
        assert shards_of(GPT2Config(n_layer=1, n_embd=64, n_head=2), 2) == {}
    assert "no tensor-parallel plan for GPT2LMHeadModel" in caplog.text


def test_stacked_experts_stay_plain():
    config = MixtralConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    assert set(shards_of(config, 2)) == {"model.layers.0.self_attn.o_proj.weight"}

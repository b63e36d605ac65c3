from __future__ import annotations

import pytest

from laminar.errors import UserError
from laminar.simulation.models.hardware import gpu
from laminar.simulation.models.language_models import check_fits, kv_capacity, language_model


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        # Totals of the published safetensors files; KV: 2 x bf16 x layers x KV heads x 128.
        ("Qwen2.5-7B", 7_615_616_512, 57_344),
        ("Qwen2.5-32B", 32_763_876_352, 262_144),
        ("Qwen2.5-72B", 72_706_203_648, 327_680),
    ],
)
def test_sizes_are_those_of_the_published_weights(name, parameters, kv_bytes):
    model = language_model(name)
    assert model.parameters == parameters
    assert model.weight_bytes == 2 * parameters
    assert model.kv_bytes_per_token == kv_bytes


def test_flops_of_a_token():
    model = language_model("Qwen2.5-7B")
    embedding = 152_064 * 3584
    assert model.decode_flops(0) == 2 * (model.parameters - embedding)
    assert model.decode_flops(1000) - model.decode_flops(0) == 4 * 28 * 28 * 128 * 1000
    # One sequence of L tokens is L tokens that attend to 0 .. L - 1 before them (and themselves): L^2 / 2 for long ones.
    token_by_token = sum(model.decode_flops(context) for context in range(4000))
    assert model.forward_flops(4000, 4000**2) == pytest.approx(token_by_token, rel=1e-4)
    assert model.training_flops(4000, 4000**2, recompute=False) == 3 * model.forward_flops(4000, 4000**2)
    assert model.training_flops(4000, 4000**2, recompute=True) == 4 * model.forward_flops(4000, 4000**2)


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="'Llama' is not known; expected one of Qwen2.5-7B, Qwen2.5-32B, Qwen2.5-72B"):
        language_model("Llama")


def test_kv_capacity_by_hand():
    # 4 x (0.9 x 81,559 MiB - 3 GB) less 65.5 GB of weights, 262,144 bytes a token.
    room = 4 * (0.9 * 81_559 * 2**20 - 3e9) - 2 * 32_763_876_352
    assert kv_capacity(language_model("Qwen2.5-32B"), gpu("H800"), 4) == int(room // 262_144)


def test_more_gpus_than_kv_heads_keep_every_head_several_times():
    model = language_model("Qwen2.5-7B")
    assert model.replica_kv_bytes_per_token(4) == 57_344
    assert model.replica_kv_bytes_per_token(28) == 7 * 57_344


def test_a_model_that_fits_gives_its_capacity():
    assert check_fits(language_model("Qwen2.5-72B"), gpu("H800"), 4, 18_432) == 459_175


@pytest.mark.parametrize(
    ("tensor_parallel", "message"),
    [
        (
            1,
            r"Qwen2.5-72B \(145.4 GB of weights\) on 1 x H800 .* room for 0 tokens .* set tensor_parallel to 4 or more",
        ),
        (2, r"room for 7705 tokens of KV cache \(327680 bytes each\); expected at least 18432.* tensor_parallel to 4"),
        (3, r"tensor_parallel: 3; expected a divisor of Qwen2.5-72B's 64 attention heads, one of 1, 2, 4, 8"),
        (0, r"tensor_parallel: 0; expected a divisor"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_remedy(tensor_parallel, message):
    with pytest.raises(UserError, match=message):
        check_fits(language_model("Qwen2.5-72B"), gpu("H800"), tensor_parallel, 18_432)


def test_a_trajectory_that_fits_nowhere():
    with pytest.raises(UserError, match="no degree up to 28 is enough"):
        check_fits(language_model("Qwen2.5-7B"), gpu("A100-80GB"), 1, 10**9)

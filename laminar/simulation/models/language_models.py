"""Shapes of language models, and the bytes and FLOPs that follow from them.

Invariant: everything is derived from the shape in the model's `config.json`; no size is written down twice.
FLOPs count a multiply-add as two, attention as causal (FlashAttention skips the masked half).
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.errors import UserError
from laminar.simulation.models.hardware import CONSTANTS, Constants, GpuSpec

BF16_BYTES = 2


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSpec:
    """A dense decoder with grouped-query attention, biased query/key/value projections and a gated feed-forward layer."""

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """All parameters; input and output embeddings are two matrices."""
        query, key_value = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * key_value) + query + 2 * key_value
        feed_forward = 3 * self.hidden * self.intermediate
        norms = 2 * self.hidden
        return self.layers * (attention + feed_forward + norms) + self.hidden + 2 * self.vocabulary * self.hidden

    @property
    def multiplied_parameters(self) -> int:
        """Parameters that every token is multiplied with: all but the input embedding, which is a look-up."""
        return self.parameters - self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in bf16."""
        return BF16_BYTES * self.parameters

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that one decode step reads."""
        return BF16_BYTES * self.multiplied_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, all layers, bf16."""
        return 2 * BF16_BYTES * self.layers * self.kv_heads * self.head_dim

    def replica_kv_bytes_per_token(self, tensor_parallel: int) -> float:
        """The same over all GPUs of a replica: with more GPUs than KV heads every head is kept several times."""
        return self.kv_bytes_per_token * max(1.0, tensor_parallel / self.kv_heads)

    @property
    def attention_flops(self) -> int:
        """FLOPs of one query token against one token of context, all layers: scores and weighted values."""
        return 4 * self.layers * self.query_heads * self.head_dim

    def decode_flops(self, context: float) -> float:
        """FLOPs of one generated token behind `context` tokens."""
        return 2 * self.multiplied_parameters + self.attention_flops * context

    def forward_flops(self, tokens: float, squared_tokens: float) -> float:
        """FLOPs of a forward pass over sequences with this sum of lengths and this sum of squared lengths."""
        return 2 * self.multiplied_parameters * tokens + self.attention_flops * squared_tokens / 2

    def training_flops(self, tokens: float, squared_tokens: float, *, recompute: bool) -> float:
        """FLOPs of forward and backward (three forwards), and one forward more with gradient checkpointing."""
        return (4 if recompute else 3) * self.forward_flops(tokens, squared_tokens)


# The config.json of Qwen/Qwen2.5-{7B,32B,72B}; test_language_models.py checks the sizes against the published weight files.
LANGUAGE_MODELS = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="Qwen2.5-7B",
            layers=28,
            hidden=3584,
            query_heads=28,
            kv_heads=4,
            head_dim=128,
            intermediate=18_944,
            vocabulary=152_064,
        ),
        ModelSpec(
            name="Qwen2.5-32B",
            layers=64,
            hidden=5120,
            query_heads=40,
            kv_heads=8,
            head_dim=128,
            intermediate=27_648,
            vocabulary=152_064,
        ),
        ModelSpec(
            name="Qwen2.5-72B",
            layers=80,
            hidden=8192,
            query_heads=64,
            kv_heads=8,
            head_dim=128,
            intermediate=29_568,
            vocabulary=152_064,
        ),
    )
}


def language_model(name: str) -> ModelSpec:
    """The model of this name.

    Raises:
        UserError: no such preset.
    """
    if name not in LANGUAGE_MODELS:
        raise UserError(f"model: {name!r} is not known; expected one of {', '.join(LANGUAGE_MODELS)}")
    return LANGUAGE_MODELS[name]


def kv_capacity(model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, constants: Constants = CONSTANTS) -> int:
    """Tokens that fit into the KV cache of one replica; zero or less when not even the weights fit."""
    per_gpu = constants.gpu_memory_share * gpu.memory_bytes - constants.activation_reserve_bytes
    return int((tensor_parallel * per_gpu - model.weight_bytes) // model.replica_kv_bytes_per_token(tensor_parallel))


def check_fits(
    model: ModelSpec,
    gpu: GpuSpec,
    tensor_parallel: int,
    max_trajectory_tokens: int,
    constants: Constants = CONSTANTS,
) -> int:
    """KV capacity of a replica in tokens, if it can serve the model at all.

    Args:
        max_trajectory_tokens: prompt and response of the longest trajectory.

    Raises:
        UserError: the heads cannot be divided so, or weights and one trajectory do not fit.
    """
    if tensor_parallel < 1 or model.query_heads % tensor_parallel:
        raise UserError(
            f"tensor_parallel: {tensor_parallel}; expected a divisor of {model.name}'s {model.query_heads} attention heads, "
            f"one of {', '.join(map(str, _degrees(model)))}"
        )
    capacity = kv_capacity(model, gpu, tensor_parallel, constants)
    if capacity >= max_trajectory_tokens:
        return capacity
    enough = [
        degree for degree in _degrees(model) if kv_capacity(model, gpu, degree, constants) >= max_trajectory_tokens
    ]
    remedy = (
        f"set tensor_parallel to {enough[0]} or more, or shorten the trajectories"
        if enough
        else f"no degree up to {model.query_heads} is enough: take a larger GPU or shorten the trajectories"
    )
    raise UserError(
        f"tensor_parallel: {tensor_parallel}; {model.name} ({model.weight_bytes / 1e9:.1f} GB of weights) on "
        f"{tensor_parallel} x {gpu.name} ({gpu.memory_bytes / 1e9:.1f} GB each) leaves room for {max(0, capacity)} tokens of "
        f"KV cache ({model.replica_kv_bytes_per_token(tensor_parallel):.0f} bytes each); expected at least {max_trajectory_tokens}, one trajectory of full "
        f"length; {remedy}"
    )


def _degrees(model: ModelSpec) -> list[int]:
    return [degree for degree in range(1, model.query_heads + 1) if model.query_heads % degree == 0]

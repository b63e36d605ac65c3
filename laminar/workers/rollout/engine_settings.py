"""What a rollout's engine is started with, by the experiment."""

from __future__ import annotations

from laminar.config.held_out import longest_context
from laminar.config.schema import ExperimentConfig
from laminar.workers.rollout.engine import EngineSettings


def moves_kv(config: ExperimentConfig) -> bool:
    """Whether trajectories move with their KV."""
    return config.repack.enabled and config.repack.move_kv != "never"


def engine_settings(config: ExperimentConfig, index: int) -> EngineSettings:
    """What an engine needs to know of the experiment."""
    return EngineSettings(
        model_path=config.model.path,
        dtype=config.model.dtype,
        context_tokens=longest_context(config),
        max_running=config.rollout.max_running,
        kv_cache_bytes=config.rollout.kv_cache_mib << 20,
        tensor_parallel=config.rollout.degree(index),
        threads=config.rollout.threads,
        seed=config.seed * 1000 + index,
        moves_kv=moves_kv(config),
        several_turns=config.environment.multi_turn,
    )

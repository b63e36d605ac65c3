"""What only vLLM brings: processes of its own, and shared memory, that must not outlive a rollout."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from laminar.errors import UserError
from laminar.weights.store import WeightStore
from laminar.weights.tensors import layout_of, write_tensors
from laminar.workers.rollout.engine import EngineSettings, GenerationRequest
from laminar.workers.rollout.move_costs import MoveCosts
from laminar.workers.rollout.step_times import StepTimes
from laminar.workers.rollout.vllm_engine import VllmEngine
from laminar.workers.rollout.vllm_kv_moves import VllmKvMoves
from tests.tiny_models import make_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")

GONE_SECONDS = 10.0  # what a run promises after a SIGKILL

# A rollout that starts an engine, has it generate, names its processes, and waits to be killed.
HOLDER = """
import asyncio, sys
import numpy as np, psutil
from laminar.workers.rollout.engine import EngineSettings, GenerationRequest
from laminar.workers.rollout.vllm_engine import VllmEngine

async def main():
    settings = EngineSettings(model_path=sys.argv[1], dtype="float32", context_tokens=1024, max_running=4,
                              kv_cache_bytes=16 << 20, tensor_parallel=int(sys.argv[2]), threads=1, seed=0)
    engine = VllmEngine(settings)
    await engine.start()
    request = GenerationRequest(request_id="r", prompt_token_ids=np.arange(8, dtype=np.int32),
                                token_ids=np.empty(0, np.int32), max_new_tokens=1000, temperature=1.0, top_p=1.0,
                                stop_token_ids=())
    async for delta in engine.generate(request):
        print("pids", *[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
        await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


def shared_memory_of(pids: list[int]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped and that still have a name."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    paths = {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line}
    return {path for path in paths if path.exists()}


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Wait for processes that are not ours to end; returns those that did not."""
    left = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(seconds * 1000):
            left.append(pid)
        os.close(descriptor)
    return left


def settings_of(model, **changes):
    values = {
        "model_path": str(model),
        "dtype": "float32",
        "context_tokens": 1024,
        "max_running": 4,
        "kv_cache_bytes": 16 << 20,
        "tensor_parallel": 1,
        "threads": 1,
        "seed": 0,
    }
    return EngineSettings(**values | changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "a", seed=0, hidden=128)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_nothing_outlives_a_killed_rollout(model, tmp_path, tensor_parallel):
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    log = tmp_path / "log"
    with log.open("wb") as errors:
        holder = subprocess.Popen(
            [sys.executable, str(script), str(model), str(tensor_parallel)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
    assert holder.stdout is not None
    pids: list[int] = []
    for line in holder.stdout:
        if line.startswith(b"pids"):
            pids = [int(word) for word in line.split()[1:]]
            break
    assert pids, log.read_text()[-2000:]
    files = shared_memory_of([holder.pid, *pids])
    names = {psutil.Process(pid).name() for pid in pids}
    holder.kill()
    holder.wait()
    left = wait_until_gone(pids, GONE_SECONDS)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    holder.stdout.close()
    assert any("EngineCore" in name for name in names)
    assert not left, f"of {pids}, {left} were still there"
    assert bool(files) == (tensor_parallel > 1), "shards talk through shared memory"
    assert not [path for path in files if path.exists()]


def test_decode_steps_are_timed_by_vllms_own_stamps_and_prefills_are_not():
    from laminar.workers.rollout.vllm_extension import LoadLogger

    times = StepTimes()
    logger = LoadLogger(MoveCosts(), times)

    def step(between_tokens, prompt_tokens=0, usage=0.5):
        logger.record(
            SimpleNamespace(num_running_reqs=len(between_tokens), kv_cache_usage=usage),
            SimpleNamespace(
                inter_token_latencies_iter=between_tokens, num_prompt_tokens=prompt_tokens, finished_requests=[]
            ),
        )

    step([0.01, 0.01, 0.02])
    step([0.5, 0.5], prompt_tokens=30)  # others were prefilled in the same step
    step([])  # a prefill alone
    logger.record(SimpleNamespace(num_running_reqs=1, kv_cache_usage=0.1), None)
    taken = times.take()
    assert taken.running.tolist() == [3]
    assert taken.seconds.tolist() == pytest.approx([0.01])
    assert taken.kv_utilization.tolist() == [0.5]
    assert (logger.running, logger.kv_utilization) == (1, 0.1)


async def test_an_abort_that_exports_waits_for_no_answer_between_its_two_messages(model):
    """vLLM answers between two steps, so each wait would pause the trajectory for one step more."""
    said = []

    async def collective_rpc(method, args):
        said.append(method)
        await asyncio.sleep(0)
        said.append("answer")

    async def abort(request_id):
        said.append("abort")

    engine = VllmEngine(settings_of(model))
    engine._engine = SimpleNamespace(collective_rpc=collective_rpc, abort=abort)
    engine._kv_moves = VllmKvMoves(engine._engine, ["a layout"], MoveCosts())
    engine._open.add("r")
    await engine.abort("r", Path("kv"))
    assert said == ["want_kv_export", "abort", "answer"]


async def test_death_of_the_engine_process_fails_its_streams(model):
    settings = settings_of(model)
    engine = VllmEngine(settings)
    await engine.start()
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=np.arange(8, dtype=np.int32),
        token_ids=np.empty(0, np.int32),
        max_new_tokens=1000,
        temperature=1.0,
        top_p=1.0,
        stop_token_ids=(),
    )
    children = psutil.Process().children(recursive=True)
    stream = engine.generate(request)
    await anext(stream)
    (core,) = [child for child in children if "EngineCore" in child.name()]
    core.kill()
    with pytest.raises(RuntimeError, match="vLLM failed on request 'r'"):
        async with asyncio.timeout(20):
            async for _ in stream:
                pass
    assert engine.load().running == 0
    await engine.close()
    assert not wait_until_gone([core.pid], GONE_SECONDS)


async def greedy_of(engine: VllmEngine, name: str) -> tuple[list[int], np.ndarray]:
    """Tokens and logprobs that follow a few prompts, one after another."""
    tokens, logprobs = [], []
    for index in range(4):
        request = GenerationRequest(
            request_id=f"{name}-{index}",
            prompt_token_ids=np.arange(index, 9 + 3 * index, dtype=np.int32),
            token_ids=np.empty(0, np.int32),
            max_new_tokens=30,
            temperature=0.0,
            top_p=1.0,
            stop_token_ids=(),
        )
        async for delta in engine.generate(request):
            tokens += delta.token_ids.tolist()
            logprobs.append(delta.logprobs)
    return tokens, np.concatenate(logprobs)


async def test_shards_of_different_degree_read_one_file_exactly(model, tmp_path):
    """One version laid out for a degree of 2, and the same laid out plainly, on replicas of degree 1 and 2."""
    other = make_model(tmp_path / "b", seed=1, hidden=128)
    state = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).state_dict()
    strange = AutoModelForCausalLM.from_pretrained(
        make_model(tmp_path / "c", seed=1, hidden=128, layers=1), dtype=torch.float32
    ).state_dict()
    shards = {name: 2 for name in state if name.endswith(("o_proj.weight", "down_proj.weight"))}
    store = WeightStore("vllm-engine", "weights", base=tmp_path)
    for version, tensors, layout in (
        (1, state, layout_of(state, shards=shards)),
        (2, state, layout_of(state)),
        (3, strange, layout_of(strange)),
    ):
        with store.begin(version, layout) as writer:
            write_tensors(writer, tensors.items())
            writer.commit()
    settings = settings_of(model, context_tokens=64)
    found = {}
    for degree in (1, 2):
        engine = VllmEngine(replace(settings, tensor_parallel=degree))
        await engine.start()
        try:
            first = await greedy_of(engine, "first")
            for version in (1, 2):
                await engine.load_weights(str(store.path(version)), version)
                found[degree, version] = await greedy_of(engine, str(version))
            with pytest.raises(ValueError, match="is not this model's weights: .*11 missing"):
                await engine.load_weights(str(store.path(3)), 3)
            again = await greedy_of(engine, "again")  # serves what it served
        finally:
            await engine.close()
        assert first[0] != again[0]
        assert again[0] == found[degree, 2][0]
        assert found[degree, 1][0] == found[degree, 2][0]
        assert np.array_equal(found[degree, 1][1], found[degree, 2][1]), "not the same weights, bit for bit"
    assert found[1, 1][0] == found[2, 1][0]
    np.testing.assert_allclose(found[1, 1][1], found[2, 1][1], atol=1e-4)


@pytest.mark.parametrize("fault", ["missing", "changed"])
async def test_a_kv_connector_that_cannot_be_loaded_is_refused_at_start(model, monkeypatch, fault):
    module = "laminar.workers.rollout.vllm_kv_connector"
    if fault == "missing":
        monkeypatch.setitem(sys.modules, module, None)
    else:
        from laminar.workers.rollout.vllm_kv_connector import KvMoveConnector

        monkeypatch.setattr(KvMoveConnector, "__abstractmethods__", frozenset({"new_method"}))
    settings = settings_of(model, context_tokens=128, max_running=2, moves_kv=True)
    engine = VllmEngine(settings)
    with pytest.raises(UserError, match=r"repack\.move_kv: the KV connector .* cannot be loaded"):
        await engine.start()
    await engine.close()

"""The contract of `laminar.workers.rollout.engine`, the same tests for every engine, against transformers' forward pass.

Two replicas of each engine are started once; every test finds both with model a's weights under a new version.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from laminar.data.tokenize import load_tokenizer
from laminar.weights.store import WeightStore
from laminar.weights.tensors import layout_of, write_tensors
from laminar.workers.rollout.engine import EngineSettings, GenerationRequest
from laminar.workers.rollout.engines import choose_engine
from laminar.workers.rollout.kv_courier import KvCourier
from laminar.workers.rollout.kv_folder import KvFolder
from laminar.workers.rollout.main import RolloutWorker
from laminar.workers.rollout.stop_texts import StopTexts
from laminar.workers.rollout.vllm_engine import BLOCK_TOKENS
from tests.tiny_models import VOCABULARY, make_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 256
MAX_RUNNING = 8
PROMPTS = [[(7 * i + 3 * j) % 256 for j in range(6 + 5 * i)] for i in range(8)]
_ids = itertools.count()


@dataclass(kw_only=True)
class Rig:
    replicas: list
    models: dict  # name -> transformers model
    store: WeightStore
    versions: itertools.count

    def publish(self, name: str) -> tuple[str, int]:
        """Write a model's weights as the next version; returns its file and number."""
        state = self.models[name].state_dict()
        version = next(self.versions)
        with self.store.begin(version, layout_of(state)) as writer:
            write_tensors(writer, state.items())
            path = writer.commit()
        self.store.retain(3)
        return str(path), version

    async def load(self, name: str) -> int:
        """Publish a model's weights and load them into both replicas."""
        path, version = self.publish(name)
        for replica in self.replicas:
            await replica.load_weights(path, version)
        return version


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["torch", "vllm"])
async def started(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    paths = {name: make_model(folder / name, seed=seed) for name, seed in (("a", 0), ("b", 1))}
    models = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name, path in paths.items()}
    replicas = []
    for seed in (0, 1):
        settings = EngineSettings(
            model_path=str(paths["a"]),
            dtype="float32",
            context_tokens=CONTEXT,
            max_running=MAX_RUNNING,
            kv_cache_bytes=16 << 20,
            tensor_parallel=1,
            threads=1,
            seed=seed,
            moves_kv=True,
            several_turns=True,
        )
        engine, _ = choose_engine(request.param, settings)
        replicas.append(engine)
    await asyncio.gather(*[replica.start() for replica in replicas])
    yield Rig(
        replicas=replicas,
        models=models,
        store=WeightStore("engine-contract", "weights", base=Path(folder)),
        versions=itertools.count(),
    )
    engine_processes = [child for child in psutil.Process().children(recursive=True) if "VLLM" in child.name()]
    assert bool(engine_processes) == (request.param == "vllm")
    for replica in replicas:
        await replica.close()
        await replica.close()  # a second time does nothing
    _, left = psutil.wait_procs(engine_processes, timeout=10)
    assert not left, "close left processes behind"


@pytest_asyncio.fixture(loop_scope="module")
async def rig(started):
    await started.load("a")
    yield started
    for replica in started.replicas:
        load = replica.load()
        assert (load.running, load.waiting, load.kv_utilization) == (0, 0, 0.0)


def make_request(prompt, **changes) -> GenerationRequest:
    values = {
        "request_id": f"r{next(_ids)}",
        "prompt_token_ids": np.array(prompt, np.int32),
        "token_ids": np.empty(0, np.int32),
        "max_new_tokens": 40,
        "temperature": 0.0,
        "top_p": 1.0,
        "stop_token_ids": (),
    }
    values |= changes
    values["token_ids"] = np.array(values["token_ids"], np.int32)
    return GenerationRequest(**values)


@dataclass
class Result:
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: set[int]


async def collect(engine, request, *, abort_at: int | None = None, seen=None) -> Result:
    """Read a stream to its end; checks the form of its deltas."""
    result = Result([], [], "", set())
    async for delta in engine.generate(request):
        assert not result.finish_reason, "a delta after the last"
        assert delta.token_ids.dtype == np.int32 and delta.logprobs.dtype == np.float32
        assert len(delta.token_ids) == len(delta.logprobs)
        assert len(delta.token_ids) or delta.finish_reason
        result.tokens += delta.token_ids.tolist()
        result.logprobs += delta.logprobs.tolist()
        result.versions.add(delta.policy_version)
        result.finish_reason = delta.finish_reason or ""
        if seen is not None:
            seen.append(engine.load())
        if abort_at is not None and len(result.tokens) >= abort_at and not result.finish_reason:
            await engine.abort(request.request_id)
            abort_at = None
    return result


@torch.inference_mode()
def forward(model, prompt, tokens, temperature=1.0) -> torch.Tensor:
    """Log-probabilities [T, vocabulary] that a plain forward pass gives for each of the response's positions."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def assert_greedy(model, prompt, result: Result, length: int) -> None:
    logprobs = forward(model, prompt, result.tokens)
    assert len(result.tokens) == length
    assert result.tokens == logprobs.argmax(-1).tolist()
    assert_logprobs(logprobs, result)


def assert_logprobs(expected: torch.Tensor, result: Result) -> None:
    chosen = expected.gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(result.logprobs, chosen.numpy(), atol=1e-4)


async def test_greedy_equals_transformers(rig):
    results = await asyncio.gather(*[collect(rig.replicas[0], make_request(prompt)) for prompt in PROMPTS])
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_greedy(rig.models["a"], prompt, result, 40)
        assert result.finish_reason == "length"
    assert len({tuple(result.tokens) for result in results}) > 1, "the models' outputs do not vary"


async def test_logprobs_are_of_the_distribution_drawn_from(rig):
    requests = [make_request(prompt, temperature=0.7) for prompt in PROMPTS]
    results = await asyncio.gather(*[collect(rig.replicas[0], request) for request in requests])
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_logprobs(forward(rig.models["a"], prompt, result.tokens, 0.7), result)
    again = await collect(rig.replicas[0], make_request(PROMPTS[0], temperature=0.7))
    assert again.tokens != results[0].tokens, "sampling is not random"


async def test_top_p_keeps_to_the_nucleus(rig):
    top_p = 0.6
    requests = [make_request(prompt, temperature=1.0, top_p=top_p) for prompt in PROMPTS]
    results = await asyncio.gather(*[collect(rig.replicas[0], request) for request in requests])
    for prompt, result in zip(PROMPTS, results, strict=True):
        ordered, order = forward(rig.models["a"], prompt, result.tokens).exp().sort(-1, descending=True)
        nucleus = (ordered.cumsum(-1) - ordered) < top_p
        kept = torch.zeros_like(nucleus).scatter(1, order, nucleus)
        probabilities = torch.zeros_like(ordered).scatter(1, order, ordered) * kept
        assert_logprobs((probabilities / probabilities.sum(-1, keepdim=True)).log(), result)


async def test_aborted_trajectory_goes_on_elsewhere(rig):
    first, second = rig.replicas

    async def move(prompt, cut):
        start = await collect(first, make_request(prompt, max_new_tokens=120), abort_at=cut)
        assert start.finish_reason == "abort"
        assert cut <= len(start.tokens) < 120
        left = 120 - len(start.tokens)
        rest = await collect(second, make_request(prompt, token_ids=start.tokens, max_new_tokens=left))
        assert rest.finish_reason == "length"
        return Result(start.tokens + rest.tokens, start.logprobs + rest.logprobs, "length", set())

    cuts = [1, 5, 17, 33, 40, 64, 2, 9]
    moved = await asyncio.gather(*[move(*pair) for pair in zip(PROMPTS, cuts, strict=True)])
    for prompt, result in zip(PROMPTS, moved, strict=True):
        assert_greedy(rig.models["a"], prompt, result, 120)


async def test_abort_of_a_waiting_trajectory_and_of_none(rig):
    engine = rig.replicas[0]
    running = [engine.generate(make_request(PROMPTS[i], max_new_tokens=200)) for i in range(MAX_RUNNING)]
    for stream in running:
        await anext(stream)
    await engine.abort("never heard of")
    for wait in (False, True):
        request = make_request(PROMPTS[0])
        waiting = asyncio.ensure_future(collect(engine, request))
        await asyncio.sleep(0)  # it begins; the engine may not have heard of it
        if wait:
            await anext(running[0])
            await anext(running[0])
            assert engine.load().waiting == 1
        await engine.abort(request.request_id)
        result = await waiting
        assert (result.tokens, result.finish_reason) == ([], "abort")
        await engine.abort(request.request_id)  # has ended
    assert engine.load().running == MAX_RUNNING
    for stream in running:
        async for delta in stream:
            last = delta
        assert last.finish_reason == "length"


async def test_swapped_weights_are_exactly_the_new_model(rig):
    engine = rig.replicas[0]
    for name in ("a", "b", "a"):
        version = await rig.load(name)
        # The same prompts under every version: a prefix cache that survived would show.
        results = await asyncio.gather(*[collect(engine, make_request(prompt)) for prompt in PROMPTS])
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert_greedy(rig.models[name], prompt, result, 40)
            assert result.versions == {version}


async def test_weights_wait_for_open_streams(rig):
    engine = rig.replicas[0]
    path, version = rig.publish("b")
    request = make_request(PROMPTS[0], max_new_tokens=200)
    stream = engine.generate(request)
    first = await anext(stream)
    assert first.policy_version == version - 1
    with pytest.raises(RuntimeError, match="streams are open"):
        await engine.load_weights(path, version)
    await engine.abort(request.request_id)
    async for delta in stream:
        assert delta.policy_version == version - 1
        if delta.finish_reason:  # from here on the stream is closed, even if nobody has read its end
            await engine.load_weights(path, version)
    assert_greedy(rig.models["b"], PROMPTS[0], await collect(engine, make_request(PROMPTS[0])), 40)


async def test_abandoned_stream_frees_its_place(rig):
    engine = rig.replicas[0]
    for leave in ("close", "cancel"):
        stream = engine.generate(make_request(PROMPTS[0], max_new_tokens=200))
        await anext(stream)
        if leave == "close":
            await stream.aclose()
        else:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        version = await rig.load("b")
        result = await collect(engine, make_request(PROMPTS[1]))
        assert_greedy(rig.models["b"], PROMPTS[1], result, 40)
        assert result.versions == {version}


async def test_wrong_weight_files_are_refused(rig):
    engine = rig.replicas[0]
    path, version = rig.publish("b")
    with pytest.raises(ValueError, match=f"holds version {version}, expected {version + 5}"):
        await engine.load_weights(path, version + 5)
    with pytest.raises(FileNotFoundError):
        await engine.load_weights(path + "-gone", version)
    result = await collect(engine, make_request(PROMPTS[0]))
    assert_greedy(rig.models["a"], PROMPTS[0], result, 40)
    assert result.versions == {version - 1}


async def test_one_batch_of_different_requests(rig):
    engine = rig.replicas[0]
    requests = [
        make_request(prompt, temperature=temperature, max_new_tokens=length)
        for prompt, temperature, length in zip(
            PROMPTS, (0.0, 1.0, 0.5, 0.0, 1.3, 0.0, 0.7, 1.0), (1, 30, 64, 100, 7, 2, 11, 50), strict=True
        )
    ]
    results = await asyncio.gather(*[collect(engine, request) for request in requests])
    for request, result in zip(requests, results, strict=True):
        prompt = request.prompt_token_ids.tolist()
        if request.temperature == 0:
            assert_greedy(rig.models["a"], prompt, result, request.max_new_tokens)
        else:
            assert len(result.tokens) == request.max_new_tokens
            assert_logprobs(forward(rig.models["a"], prompt, result.tokens, request.temperature), result)
        assert result.finish_reason == "length"


async def test_stop_tokens_end_and_are_included(rig):
    engine = rig.replicas[0]
    whole = await collect(engine, make_request(PROMPTS[2], max_new_tokens=60))
    stop = whole.tokens[20]
    end = whole.tokens.index(stop) + 1
    unused = next(token for token in range(VOCABULARY) if token not in whole.tokens)
    stopped, last, untouched = await asyncio.gather(
        collect(engine, make_request(PROMPTS[2], max_new_tokens=60, stop_token_ids=(unused, stop))),
        collect(engine, make_request(PROMPTS[2], max_new_tokens=end, stop_token_ids=(stop,))),
        collect(engine, make_request(PROMPTS[2], max_new_tokens=60, stop_token_ids=(unused,))),
    )
    assert (stopped.tokens, stopped.finish_reason) == (whole.tokens[:end], "stop")
    assert (last.tokens, last.finish_reason) == (whole.tokens[:end], "stop"), "stopping counts, not the length"
    assert (untouched.tokens, untouched.finish_reason) == (whole.tokens, "length")


async def turn(engine, stops, request) -> Result:
    """A turn as the rollout worker has it generated: up to the first stop text."""
    session = SimpleNamespace(config=SimpleNamespace(rollout=None))
    result = Result([], [], "", set())
    async for delta in RolloutWorker(session, engine, (), stop_texts=stops)._turn(None, request):
        result.tokens += delta.token_ids.tolist()
        result.logprobs += delta.logprobs.tolist()
        result.finish_reason = delta.finish_reason or ""
    return result


async def test_a_turn_ends_at_a_stop_text_and_the_next_goes_on_behind_the_observation(rig, monkeypatch):
    engine, model, prompt = rig.replicas[0], rig.models["a"], PROMPTS[7]
    tokenizer = load_tokenizer(model.config.name_or_path)
    whole = await collect(engine, make_request(prompt, max_new_tokens=100))
    places = [
        place
        for place in range(40, 98)
        if all(tokenizer.decode([t]).isprintable() and tokenizer.decode([t]) for t in whole.tokens[place : place + 3])
    ]
    text = tokenizer.decode(whole.tokens[places[0] : places[0] + 3])
    end = next(n for n in range(1, 101) if text in tokenizer.decode(whole.tokens[:n]))
    assert end > 8, "it ends within the first delta"
    stops = StopTexts(tokenizer, [text])
    assert not stops.token_ids, "the engine would stop by itself"
    first = await turn(engine, stops, make_request(prompt, max_new_tokens=100))
    assert_greedy(model, prompt, first, end)
    assert first.finish_reason == "stop"

    cached = cached_tokens(engine, monkeypatch)
    observed = [*first.tokens, *range(30, 47)]
    second = await turn(engine, stops, make_request(prompt, token_ids=observed, max_new_tokens=5))
    assert_greedy(model, [*prompt, *observed], second, 5)
    if cached is not None:
        whole_blocks = (len(prompt) + end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert cached == [whole_blocks] and whole_blocks >= 2 * BLOCK_TOKENS


def cached_tokens(engine, monkeypatch) -> list[int] | None:
    """Tokens of each context, from now on, that vLLM finds in its prefix cache; None: the engine has none."""
    figures = getattr(engine, "_figures", None)
    if figures is None:
        return None
    found, record = [], figures.record

    def watch(scheduler_stats, iteration_stats, *more, **named):
        if iteration_stats is not None:
            found.extend(finished.num_cached_tokens for finished in iteration_stats.finished_requests)
        record(scheduler_stats, iteration_stats, *more, **named)

    monkeypatch.setattr(figures, "record", watch)
    return found


async def test_load_figures_move(rig):
    engine = rig.replicas[0]
    seen = []
    requests = [make_request(PROMPTS[i % 8], max_new_tokens=100) for i in range(MAX_RUNNING + 4)]
    await asyncio.gather(*[collect(engine, request, seen=seen) for request in requests])
    assert max(load.running for load in seen) == MAX_RUNNING
    assert max(load.waiting for load in seen) >= 4
    assert all(load.running <= MAX_RUNNING and 0 <= load.kv_utilization <= 1 for load in seen)
    assert max(load.kv_utilization for load in seen) > 0
    busiest = max(seen, key=lambda load: load.kv_utilization)
    assert busiest.running > 1
    assert engine.load().running == 0


async def test_requests_that_cannot_be_generated_are_refused(rig):
    engine = rig.replicas[0]
    prompt = [1] * 100
    for changes, message in (
        ({"max_new_tokens": CONTEXT - 99}, "do not fit the context of 256"),
        ({"token_ids": [2] * 100, "max_new_tokens": 57}, "do not fit the context of 256"),
        ({"prompt_token_ids": np.empty(0, np.int32)}, "prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt_token_ids": np.array([0, VOCABULARY], np.int32)}, "vocabulary"),
        ({"token_ids": [-1]}, "vocabulary"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_p": 0.0}, "top_p is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(make_request(prompt, **changes))
    fits = await collect(engine, make_request(prompt, max_new_tokens=CONTEXT - 100))
    assert_greedy(rig.models["a"], prompt, fits, CONTEXT - 100)


async def test_ids_of_open_streams_are_unique(rig):
    engine = rig.replicas[0]
    request = make_request(PROMPTS[0], max_new_tokens=200)
    stream = engine.generate(request)
    await anext(stream)
    with pytest.raises(ValueError, match="with this id is open"):
        engine.generate(request)
    await stream.aclose()
    assert (await collect(engine, request)).finish_reason == "length"


async def test_seeded_requests_repeat(rig):
    for engine in rig.replicas:
        sampled = [
            await asyncio.gather(
                *[collect(engine, make_request(PROMPTS[3], temperature=1.0, seed=seed)) for seed in seeds]
            )
            for seeds in ((5, 6), (6, 7, 5))
        ]
        assert sampled[0][0].tokens == sampled[1][2].tokens
        assert sampled[0][1].tokens == sampled[1][0].tokens
        assert sampled[0][0].tokens != sampled[0][1].tokens


async def moved(rig, prompt, kv, *, cut, length=200, bring=None, **changes):
    """Generate `cut` tokens at the first replica, move them with their KV, and go on at the second; `bring` takes it to another host."""
    source, target = rig.replicas
    request = make_request(prompt, max_new_tokens=length, **changes)
    first, exported = Result([], [], "", set()), None
    async for delta in source.generate(request):
        first.tokens += delta.token_ids.tolist()
        first.logprobs += delta.logprobs.tolist()
        exported = delta.exported
        if len(first.tokens) >= cut and delta.finish_reason is None:
            await source.abort(request.request_id, kv)
    left = length - len(first.tokens)
    kv = await bring(exported) if bring else kv
    second, imported = Result([], [], "", set()), []
    request = make_request(prompt, token_ids=first.tokens, max_new_tokens=left, kv=kv, **changes)
    async for delta in target.generate(request):
        second.tokens += delta.token_ids.tolist()
        second.logprobs += delta.logprobs.tolist()
        imported += [delta.imported] if delta.imported else []
        second.finish_reason = delta.finish_reason or ""
    both = Result(first.tokens + second.tokens, first.logprobs + second.logprobs, second.finish_reason, set())
    return both, exported, imported


async def test_kv_moves_and_greedy_goes_on_the_same(rig, tmp_path):
    for number, (prompt, cut) in enumerate(zip(PROMPTS, (1, 3, 7, 12, 17, 23, 28, 31), strict=True)):
        result, exported, imported = await moved(rig, prompt, tmp_path / f"kv-{number}", cut=cut)
        assert_greedy(rig.models["a"], prompt, result, 200)
        assert exported.tokens >= len(prompt) + cut - 1 and exported.nbytes > exported.tokens * 256
        assert exported.nbytes == (tmp_path / f"kv-{number}.0").stat().st_size
        assert [one.error for one in imported] == [""]
        assert imported[0].tokens >= len(prompt) + cut - 1 and imported[0].nbytes == exported.nbytes
    load = rig.replicas[1].load()
    assert load.kv_move_s_per_token > 0


async def test_kv_moves_to_another_host_and_greedy_goes_on_the_same(rig, tmp_path):
    folders = []
    for host in ("one", "other"):  # each with its own shared memory
        (tmp_path / host).mkdir()
        folders.append(KvFolder("r", tmp_path / host))
    source, target = (KvCourier(f"rollout-{k}", folder, "127.0.0.1", b"k" * 32) for k, folder in enumerate(folders))

    async def bring(exported):
        path, error = await target.bring(source.exported("7.1", 1, 1, exported), 2)
        assert not error and path.parent == folders[1].directory
        return path

    export = source.export_path("7.1", 1)
    result, _, imported = await moved(rig, PROMPTS[2], export, cut=20, bring=bring)
    assert_greedy(rig.models["a"], PROMPTS[2], result, 200)
    assert [one.error for one in imported] == [""] and imported[0].tokens >= len(PROMPTS[2]) + 19
    await source.close()
    await target.close()


async def test_many_move_at_once(rig, tmp_path):
    moves = [moved(rig, prompt, tmp_path / f"kv-{k}", cut=10) for k, prompt in enumerate(PROMPTS)]
    for prompt, (result, _, imported) in zip(PROMPTS, await asyncio.gather(*moves), strict=True):
        assert_greedy(rig.models["a"], prompt, result, 200)
        assert [one.error for one in imported] == [""]


@pytest.mark.parametrize("damage", ["gone", "payload", "header", "short", "version", "other"])
async def test_kv_that_does_not_fit_costs_a_prefill_and_no_more(rig, tmp_path, damage):
    prompt, kv = PROMPTS[3], tmp_path / "kv"
    file = tmp_path / "kv.0"
    source, target = rig.replicas
    request = make_request(prompt, max_new_tokens=200)
    tokens = []
    async for delta in source.generate(request):
        tokens += delta.token_ids.tolist()
        if len(tokens) >= 10 and delta.finish_reason is None:
            await source.abort(request.request_id, kv)
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "version":
        await rig.load("a")
    elif damage == "other":
        prompt = PROMPTS[4]
    else:
        if damage == "short":
            del content[-100:]
        else:
            content[-100 if damage == "payload" else 20] ^= 1
        file.write_bytes(content)
    imported, result = [], Result([], [], "", set())
    async for delta in target.generate(make_request(prompt, token_ids=tokens, max_new_tokens=20, kv=kv)):
        result.tokens += delta.token_ids.tolist()
        imported += [delta.imported] if delta.imported else []
    assert len(result.tokens) == 20
    assert result.tokens == forward(rig.models["a"], [*prompt, *tokens], result.tokens).argmax(-1).tolist()
    assert len(imported) == 1 and imported[0].error and not imported[0].tokens


async def test_an_abort_exports_only_where_there_is_something_to_export(rig, tmp_path):
    engine = rig.replicas[0]
    requests = [make_request(PROMPTS[k % 8], max_new_tokens=200) for k in range(MAX_RUNNING + 1)]
    begun = [asyncio.Event() for _ in requests]

    async def stream(request, event):
        async for delta in engine.generate(request):
            event.set()
            reason = delta.finish_reason, delta.exported
        return reason

    streams = [asyncio.create_task(stream(*each)) for each in zip(requests, begun, strict=True)]
    await asyncio.gather(*[event.wait() for event in begun[:MAX_RUNNING]])
    for k, request in reversed(list(enumerate(requests))):
        await engine.abort(request.request_id, tmp_path / f"kv-{k}")
    ends = await asyncio.gather(*streams)
    assert [reason for reason, _ in ends] == ["abort"] * len(requests)
    assert [exported is not None for _, exported in ends] == [True] * MAX_RUNNING + [False]  # the last one waited
    assert len(list(tmp_path.iterdir())) == MAX_RUNNING


async def test_decode_steps_are_timed_by_batch_size(rig):
    engine = rig.replicas[0]
    engine.step_times.take()
    await asyncio.gather(*[collect(engine, make_request(PROMPTS[0], max_new_tokens=count)) for count in (20, 20, 40)])
    steps = engine.step_times.take()
    assert set(steps.running.tolist()) >= {1, 3} and max(steps.running) == 3
    assert len(steps.seconds) == len(steps.kv_utilization) == len(steps.running)
    assert (steps.seconds > 0).all() and (steps.seconds < 10).all()
    assert (steps.kv_utilization >= 0).all() and (steps.kv_utilization <= 1).all()
    assert len(engine.step_times.take().running) == 0

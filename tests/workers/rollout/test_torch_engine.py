"""What only the torch engine brings; the contract is in test_engine_contract."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from laminar.errors import UserError
from laminar.weights.store import WeightStore
from laminar.weights.tensors import layout_of, write_tensors
from laminar.workers.rollout.engine import EngineSettings, GenerationRequest
from laminar.workers.rollout.torch_engine import TorchEngine
from tests.tiny_models import make_model

SETTINGS = EngineSettings(
    model_path="",
    dtype="float32",
    context_tokens=128,
    max_running=4,
    kv_cache_bytes=16 << 20,
    tensor_parallel=1,
    threads=1,
    seed=0,
)


def make_request(request_id: str, prompt: list[int], **changes) -> GenerationRequest:
    values = {"token_ids": np.empty(0, np.int32), "max_new_tokens": 30, "temperature": 0.0, "top_p": 1.0}
    values |= {"stop_token_ids": ()} | changes
    return GenerationRequest(request_id=request_id, prompt_token_ids=np.array(prompt, np.int32), **values)


async def tokens_of(engine: TorchEngine, request: GenerationRequest) -> list[int]:
    return [token async for delta in engine.generate(request) for token in delta.token_ids.tolist()]


def greedy(model, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture
async def engine(tmp_path):
    engine = TorchEngine(replace(SETTINGS, model_path=str(make_model(tmp_path / "a", seed=0))))
    await engine.start()
    yield engine
    await engine.close()


async def test_other_architectures_and_untied_heads(tmp_path):
    shape = {"vocab_size": 120, "initializer_range": 0.3}
    torch.manual_seed(0)
    make_model(tmp_path / "untied", seed=3, tied=False)
    GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=128, **shape)).save_pretrained(
        tmp_path / "gpt2"
    )
    mistral = MistralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=128,
        **shape,
    )
    MistralForCausalLM(mistral).save_pretrained(tmp_path / "mistral")
    for name in ("untied", "gpt2", "mistral"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        engine = TorchEngine(replace(SETTINGS, model_path=str(tmp_path / name)))
        await engine.start()
        prompts = [[1, 2, 3], [5] * 20, [1, 2, 3], [9], [7, 7, 8, 11, 13]]
        requests = [make_request(str(i), prompt) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*[tokens_of(engine, request) for request in requests])
        await engine.close()
        assert results == [greedy(model, prompt, 30) for prompt in prompts], name


async def test_models_that_it_cannot_compute_exactly_are_refused(tmp_path):
    config = MistralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=16,
        vocab_size=120,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path / "window")
    with pytest.raises(UserError, match="use rollout.engine: vllm"):
        await TorchEngine(replace(SETTINGS, model_path=str(tmp_path / "window"))).start()
    with pytest.raises(UserError, match="nothing-here"):
        await TorchEngine(replace(SETTINGS, model_path=str(tmp_path / "nothing-here"))).start()
    path = str(make_model(tmp_path / "a", seed=0))
    with pytest.raises(UserError, match="holds no trajectory of 128 tokens"):
        await TorchEngine(replace(SETTINGS, model_path=path, kv_cache_bytes=1000)).start()


async def test_seeded_trajectory_goes_on_the_same_after_a_move(engine, tmp_path):
    whole = await tokens_of(engine, make_request("whole", [1, 2, 3], temperature=1.0, seed=7))
    other = TorchEngine(replace(SETTINGS, model_path=str(tmp_path / "a"), seed=99))
    await other.start()
    crowd = [tokens_of(other, make_request(str(i), [i], temperature=1.0)) for i in range(3)]
    rest = make_request("rest", [1, 2, 3], token_ids=np.array(whole[:11], np.int32), max_new_tokens=19, seed=7)
    results = await asyncio.gather(tokens_of(other, replace(rest, temperature=1.0)), *crowd)
    await other.close()
    assert whole[:11] + results[0] == whole


async def test_another_models_weights_change_nothing(engine, tmp_path):
    expected = await tokens_of(engine, make_request("before", [4, 5, 6]))
    store = WeightStore("torch-engine", "weights", base=tmp_path)
    for version, shape, dtype, difference in (
        (1, {"layers": 1}, torch.float32, r"11 missing \(model\.layers\.1\."),
        (2, {"layers": 3}, torch.float32, r"11 not of the model \(model\.layers\.2\."),
        (3, {"hidden": 128}, torch.float32, r"embed_tokens\.weight is float32 \[300, 128\], the model has"),
        (4, {}, torch.bfloat16, "is bfloat16 .*, the model has float32"),
        (5, {"tied": False}, torch.float32, r"1 not of the model \(lm_head\.weight\)"),
    ):
        path = make_model(tmp_path / str(version), seed=1, **shape)
        state = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
        with store.begin(version, layout_of(state)) as writer:
            write_tensors(writer, state.items())
            file = writer.commit()
        with pytest.raises(ValueError, match=f"is not this model's weights: .*{difference}"):
            await engine.load_weights(str(file), version)
    assert await tokens_of(engine, make_request("after", [4, 5, 6])) == expected


async def test_a_version_laid_out_for_shards_loads_the_same(engine, tmp_path):
    path = make_model(tmp_path / "b", seed=1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    shards = {name: 2 for name in model.state_dict() if name.endswith(("o_proj.weight", "down_proj.weight"))}
    layout = layout_of(model.state_dict(), shards=shards)
    with WeightStore("torch-engine", "weights", base=tmp_path).begin(1, layout) as writer:
        write_tensors(writer, model.state_dict().items())
        file = writer.commit()
    await engine.load_weights(str(file), 1)
    assert await tokens_of(engine, make_request("r", [4, 5, 6])) == greedy(model, [4, 5, 6], 30)


async def test_bfloat16(tmp_path):
    path = str(make_model(tmp_path / "a", seed=0))
    engine = TorchEngine(replace(SETTINGS, model_path=path, dtype="bfloat16"))
    await engine.start()
    deltas = [delta async for delta in engine.generate(make_request("r", [1, 2, 3]))]
    await engine.close()
    tokens = [token for delta in deltas for token in delta.token_ids.tolist()]
    logprobs = np.concatenate([delta.logprobs for delta in deltas])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[1, 2, 3, *tokens]])).logits[0, 2:-1].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    np.testing.assert_allclose(logprobs, chosen, atol=0.3)


async def test_close_fails_open_streams(engine):
    stream = engine.generate(make_request("r", [1], max_new_tokens=120))
    await anext(stream)
    await engine.close()
    with pytest.raises(RuntimeError, match="was closed"):
        async for _ in stream:
            pass
    with pytest.raises(RuntimeError, match="was closed"):
        await tokens_of(engine, make_request("s", [1]))


async def test_an_error_in_the_thread_reaches_every_stream(engine, monkeypatch):
    def fail(*arguments):
        raise MemoryError("no more")

    streams = [asyncio.ensure_future(tokens_of(engine, make_request(str(i), [i], max_new_tokens=100))) for i in (1, 2)]
    monkeypatch.setattr("laminar.workers.rollout.token_sampling.draw", fail)
    for result in await asyncio.gather(*streams, return_exceptions=True):
        assert isinstance(result, RuntimeError)
        assert "no more" in str(result)
    with pytest.raises(RuntimeError, match="no more"):
        await tokens_of(engine, make_request("later", [1]))


async def test_a_small_cache_runs_fewer_at_once_and_says_so(tmp_path, caplog, engine):
    small = TorchEngine(replace(SETTINGS, model_path=str(tmp_path / "a"), kv_cache_bytes=150 << 10))
    await small.start()
    assert (
        "rollout.kv_cache_mib: room for 2 trajectories of 128 tokens at once, rollout.max_running is 4" in caplog.text
    )
    requests = [make_request(str(k), [k, 7, 9]) for k in range(4)]
    fewer = await asyncio.gather(*(tokens_of(small, request) for request in requests))
    assert fewer == await asyncio.gather(*(tokens_of(engine, request) for request in requests))
    await small.close()

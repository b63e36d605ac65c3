"""Adapters: what trains, what is published, what is checkpointed, and that all three are the same policy."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from laminar.errors import UserError
from laminar.protocol.messages import SaveCheckpoint
from laminar.weights.store import WeightStore
from laminar.weights.tensors import read_tensors
from laminar.workers.rollout.engine import EngineSettings, GenerationRequest
from laminar.workers.rollout.torch_engine import TorchEngine
from laminar.workers.trainer.checkpoint import load_checkpoint, needed_bytes, save_checkpoint
from laminar.workers.trainer.lora import adapters_off
from laminar.workers.trainer.publish import Publisher
from laminar.workers.trainer.scoring_model import ScoringModel
from tests.workers.trainer.batches import largest_difference, parameters_of, random_step

LORA = {"rank": 4, "alpha": 16.0}
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def published(shared_memory):
    """The tensors of an actor's policy, as rollouts get them."""

    def publish(actor, name="relay-0"):
        store = WeightStore("run", name, base=shared_memory)
        Publisher(actor, store).publish(0)
        return dict(read_tensors(store.path(0)))

    return publish


def trained(make_actor, *, steps=3, lora=None, **options):
    actor = make_actor(lora={**LORA, **(lora or {})}, optimizer={"learning_rate": 0.05}, **options)
    for step in range(1, steps + 1):
        actor.train_step(random_step(step, seed=step))
    return actor


def saved(actor, path):
    answer = save_checkpoint(actor, SaveCheckpoint(order=1, step=1, policy_version=1, path=str(path), state="{}"))
    assert answer.error == ""
    return answer


def logprobs(model, tokens):
    """Of each token after the first, by a plain Hugging Face model."""
    with torch.no_grad():
        scores = model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)
    return scores[:-1].gather(1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_first_adapters_change_nothing(make_actor, model_folder, published, dtype):
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype)).state_dict()
    tensors = published(make_actor(lora=LORA, dtype=dtype))
    assert tensors.keys() == base.keys() - {"lm_head.weight"}  # tied
    assert all(torch.equal(tensor, base[name]) for name, tensor in tensors.items())


def test_only_adapters_are_trained(make_actor, model_folder, published):
    actor = trained(make_actor)
    base = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    for name, parameter in actor.model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        if not parameter.requires_grad:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")]), name
    tensors = published(actor)
    changed = {name for name, tensor in tensors.items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in base if name.split(".")[-2] in ADAPTED}
    assert len(actor.optimizer.state) == len(actor.parameters) == 2 * len(changed)


def test_some_layers_alone_get_adapters(make_actor, model_folder, published):
    base = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    tensors = published(trained(make_actor, lora={"target_modules": ["q_proj", "layers.1.mlp.up_proj"]}))
    changed = {name for name, tensor in tensors.items() if not torch.equal(tensor, base[name])}
    assert changed == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    }


@pytest.mark.parametrize(
    "target, hint", [("q_prj", "did you mean q_proj"), ("lm_head", "q_proj"), ("embed_tokens", "there are down_proj")]
)
def test_a_target_that_is_no_linear_layer_is_refused(make_actor, target, hint):
    with pytest.raises(UserError, match=f"trainer.lora.target_modules: {target}: .*{hint}"):
        make_actor(lora={**LORA, "target_modules": ["v_proj", target]})


def test_the_published_policy_is_the_trained_one(make_actor, model_folder, published):
    """Logprobs of the trainer (base and adapters) equal those of a plain model with the published weights."""
    actor = trained(make_actor)
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    before = logprobs(plain, tokens := torch.arange(3, 40))
    plain.load_state_dict(published(actor), strict=False)
    merged = logprobs(plain, tokens)
    positions, targets = torch.arange(len(tokens) - 1), tokens[1:]
    ours, _ = ScoringModel(actor.model, 1.0)(tokens[None], positions, targets)
    assert (ours - merged).abs().max() < 2e-5
    assert (before - merged).abs().max() > 0.05  # it has learned something
    with adapters_off(actor.model):
        off, _ = ScoringModel(actor.model, 1.0)(tokens[None], positions, targets)
    assert (off - before).abs().max() < 2e-5


async def test_an_engine_with_the_published_weights_gives_the_trainers_logprobs(
    make_actor, model_folder, published, shared_memory
):
    actor = trained(make_actor)
    published(actor)
    settings = EngineSettings(
        model_path=str(model_folder),
        dtype="float32",
        context_tokens=64,
        max_running=2,
        kv_cache_bytes=1 << 20,
        tensor_parallel=1,
        threads=1,
        seed=0,
    )
    engine = TorchEngine(settings)
    prompt = np.arange(3, 13, dtype=np.int32)
    try:
        await engine.start()
        await engine.load_weights(str(WeightStore("run", "relay-0", base=shared_memory).path(0)), 0)
        request = GenerationRequest(
            request_id="r",
            prompt_token_ids=prompt,
            token_ids=np.empty(0, np.int32),
            max_new_tokens=30,
            temperature=1.0,
            top_p=1.0,
            stop_token_ids=(),
            seed=1,
        )
        async with asyncio.timeout(60):
            deltas = [delta async for delta in engine.generate(request)]
    finally:
        await engine.close()
    response = np.concatenate([delta.token_ids for delta in deltas])
    tokens = torch.from_numpy(np.concatenate([prompt, response])).long()
    positions = torch.arange(len(prompt) - 1, len(tokens) - 1)
    ours, _ = ScoringModel(actor.model, 1.0)(tokens[None], positions, tokens[len(prompt) :])
    theirs = torch.from_numpy(np.concatenate([delta.logprobs for delta in deltas]))
    assert len(response) == 30
    assert (ours - theirs).abs().max() < 5e-5


def test_the_reference_is_the_base_model_without_a_copy_of_it(make_actor, model_folder):
    kl = {"coefficient": 0.1}
    ours = trained(make_actor, steps=0, algorithm={"kl": kl})
    theirs = trained(make_actor, steps=0, algorithm={"kl": kl | {"reference_path": str(model_folder)}})
    for step in (1, 2, 3):
        mine, other = (actor.train_step(random_step(step, seed=step)) for actor in (ours, theirs))
        assert mine["kl_reference"] == pytest.approx(other["kl_reference"], rel=1e-5, abs=1e-9)
        assert (mine["kl_reference"] > 0) == (step > 1)  # adapters start as nothing
    assert largest_difference(parameters_of(ours), parameters_of(theirs)) < 1e-6


def test_dropout_is_in_updates_and_not_in_what_they_are_compared_with(make_actor, published):
    """Old logprobs are of the policy that was published; a mini-batch's own pass draws a mask."""
    plain, dropping = (trained(make_actor, steps=2, lora={"dropout": dropout}) for dropout in (0.0, 0.5))
    message = random_step(3, seed=3, mini_batches=2)
    dropping.model.load_state_dict(plain.model.state_dict())
    mine, other = (actor.train_step(message) for actor in (plain, dropping))
    assert other["mismatch_kl"] == pytest.approx(mine["mismatch_kl"], rel=1e-5)
    assert mine["loss"] != other["loss"]


def test_a_checkpoint_holds_adapters_alone_and_goes_on_as_if_nothing_had_been(make_actor, tmp_path):
    actor = trained(make_actor)
    answer = saved(actor, tmp_path / "checkpoint")
    values = sum(parameter.numel() for parameter in actor.parameters)
    assert 4 * 4 * values < answer.nbytes < 4 * 4 * values + 400_000  # what torch writes beside them
    assert needed_bytes(actor) >= answer.nbytes
    assert not (tmp_path / "checkpoint" / "huggingface").exists()
    actor.train_step(random_step(4, seed=4))
    other = make_actor(lora=LORA, optimizer={"learning_rate": 0.05})
    load_checkpoint(other, tmp_path / "checkpoint")
    other.train_step(random_step(4, seed=4))
    assert largest_difference(parameters_of(actor), parameters_of(other)) == 0


@pytest.mark.parametrize("change", [{"alpha": 8.0}, {"rank": 2}])
def test_adapters_of_another_kind_are_not_taken_for_ones_own(make_actor, tmp_path, change):
    saved(trained(make_actor, steps=1), tmp_path / "checkpoint")
    key = f"trainer.lora.{next(iter(change))}"
    with pytest.raises(UserError, match=f"adapters were trained with {key}"):
        load_checkpoint(make_actor(lora={**LORA, **change}), tmp_path / "checkpoint")


def test_adapters_on_another_base_model_are_refused(make_actor, tmp_path):
    saved(trained(make_actor, steps=1), tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "/elsewhere"}))
    with pytest.raises(UserError, match="adapters were trained with model.path /elsewhere"):
        load_checkpoint(make_actor(lora=LORA), tmp_path / "checkpoint")


def test_other_tools_load_the_adapters(make_actor, model_folder, published, tmp_path):
    """peft, transformers, and our own merge, which is what was published to the bit."""
    actor = trained(make_actor)
    saved(actor, tmp_path / "checkpoint")
    adapter = tmp_path / "checkpoint" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model_folder)
    assert len(load_file(adapter / "adapter_model.safetensors")) == len(actor.parameters)
    expected = published(actor)
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), adapter).merge_and_unload()
    state = by_peft.state_dict()
    assert all((state[name] - tensor).abs().max() < 1e-6 for name, tensor in expected.items())
    tokens = torch.arange(3, 40)
    by_transformers = AutoModelForCausalLM.from_pretrained(adapter)
    assert (logprobs(by_transformers, tokens) - logprobs(by_peft, tokens)).abs().max() < 2e-5
    subprocess.run(
        [sys.executable, "-m", "laminar.workers.trainer.merge_adapter", str(adapter), str(tmp_path / "merged")],
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())


def test_bfloat16_keeps_masters_of_adapters_and_a_small_base(make_actor, published):
    actor = trained(make_actor, dtype="bfloat16")
    assert {parameter.dtype for parameter in actor.parameters} == {torch.float32}
    frozen = [parameter for parameter in actor.model.parameters() if not parameter.requires_grad]
    assert {parameter.dtype for parameter in frozen} == {torch.bfloat16}
    assert {tensor.dtype for tensor in published(actor).values()} == {torch.bfloat16}

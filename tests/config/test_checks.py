from __future__ import annotations

import os

import pytest

from laminar.config import machine, mpi_installation
from laminar.config.checks import check_config, check_machine
from laminar.config.load import load_config
from laminar.errors import UserError
from tests.config.conftest import write_model_config, write_safetensors


def config_error(path, *overrides: str) -> str:
    config = load_config(path, overrides)
    with pytest.raises(UserError) as caught:
        check_config(config)
    return str(caught.value)


def machine_error(path, *overrides: str) -> str:
    config = load_config(path, overrides)
    check_config(config)
    with pytest.raises(UserError) as caught:
        check_machine(config)
    return str(caught.value)


@pytest.fixture
def installed(monkeypatch):
    """The modules that this machine pretends to have."""
    modules = {"torch", "transformers", "accelerate", "mpi4py", "vllm"}
    monkeypatch.setattr(machine, "has_module", modules.__contains__)
    monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: False)
    return modules


def test_the_valid_example_passes(config_file):
    config = load_config(config_file)
    check_config(config)
    check_machine(config)


# Keys against each other


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.mini_batches=3"], "trainer.mini_batches: 3; expected a divisor of trainer.groups_per_step (4)"),
        (
            ["repack.enabled=true", "repack.batch_bound=65"],
            "repack.batch_bound: 65; expected at most rollout.max_running (64)",
        ),
        (
            ["repack.enabled=true", "repack.batch_bound_ceiling=65"],
            "repack.batch_bound_ceiling: 65; expected at most rollout.max_running (64)",
        ),
        (
            ["repack.enabled=true", "repack.batch_bound_floor=9", "repack.batch_bound_ceiling=8"],
            "repack.batch_bound_floor: 9; expected at most repack.batch_bound_ceiling (8)",
        ),
        (["repack.enabled=true", "repack.batch_bound=1"], "repack.batch_bound: 1; a rollout with a single trajectory"),
        (
            ["repack.enabled=true", "repack.interval_s=1800"],
            "repack.interval_s: 1800; expected less than controller.step_timeout_s (1800)",
        ),
        (["repack.enabled=true", "schedule.name=partial"], "repack.enabled: true; under schedule.name: partial"),
        (["trainer.ranks=5", "trainer.mini_batches=4"], "trainer.ranks: 5; expected at most 4"),
        (["rollout.max_running=3"], "rollout.max_running: 3; expected at least trainer.group_size (4)"),
        (["trainer.max_tokens_per_micro_batch=199"], "trainer.max_tokens_per_micro_batch: 199; expected at least 200"),
        (["data.source.prompts=3", "data.last_batch=drop"], "data.source.prompts: 3; with 1 epochs they do not fill"),
        (["data.system_prompt=Be brief."], "data.system_prompt: set, but data.chat is false"),
        (["data.prompt_template='{question'"], "data.prompt_template: not a template"),
        (["data.prompt_template='Add {}'"], "data.prompt_template: a field without a name"),
        (["data.prompt_template=Add"], "data.prompt_template: holds no field"),
        (["reward.function=exct"], 'reward.function: "exct"; expected reasoning_gym, exact, numeric, '),
        (["reward.function=exct"], "did you mean exact?"),
        (["reward.function=my.module.score"], "a colon stands between module and function"),
        (["reward.function='my.module:1'"], 'reward.function: "my.module:1"'),
        (["data.source={type: jsonl, path: a}"], "reward.function: reasoning_gym scores reasoning-gym's prompts only"),
        (
            ["controller.silence_limit_s=1"],
            "controller.silence_limit_s: 1; expected at least twice controller.heartbeat_s",
        ),
        (
            ["rollout.suspect_after_s=1.5"],
            "rollout.suspect_after_s: 1.5; expected at least twice controller.heartbeat_s",
        ),
        (
            ["rollout.silence_limit_s=4"],
            "rollout.silence_limit_s: 4; expected at least rollout.suspect_after_s (5)",
        ),
        (["rollout.temperature=0"], "rollout.temperature: 0; expected above 0"),
        (["reward.params={pattern: x}"], "reward.params.pattern: reasoning_gym has no such option"),
        (
            ["reward.function=regex", "reward.parts=[{function: exact}]"],
            "reward.parts: set beside reward.function or reward.params",
        ),
        (["reward.parts=[{function: exact}, {function: exct}]"], 'reward.parts.1.function: "exct"; expected'),
        (
            ["reward.parts=[{function: exact}, {function: exact}]"],
            "reward.parts.1.name: exact: another part has this name",
        ),
        (["reward.parts=[{function: exact, weight: 0}]"], "reward.parts.0.weight: 0; expected another number"),
        (
            ["reward.parts=[{function: regex}]"],
            "reward.parts.0.params.pattern: missing; regex needs it",
        ),
        (["data.chat_template=x.jinja"], "data.chat_template: set, but data.chat is false"),
        (
            ["data.source={type: jsonl, path: a, format: gsm8k, prompt_field: q}", "reward.function=exact"],
            "data.source.prompt_field: set, but data.source.format: gsm8k knows its columns",
        ),
    ],
)
def test_contradictions_name_the_key(config_file, overrides, expected):
    assert expected in config_error(config_file, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.mini_batches=4", "trainer.ranks=4"],
        ["rollout.max_running=4"],
        ["trainer.max_tokens_per_micro_batch=200"],
        ["data.source.prompts=3", "data.last_batch=train"],
        ["data.source.prompts=2", "data.epochs=2", "data.last_batch=drop"],
        ["data.system_prompt=Be brief.", "data.chat=true"],
        ["data.prompt_template='{{literal}} {question} {difficulty[level]}'"],
        ["reward.function=my_package.rewards:Scorer.score"],
        ["data.source={type: jsonl, path: a}", "reward.function=numeric"],
        ["trainer.strategy=fsdp", "trainer.ranks=1"],
        ["relay.transport=tcp", "relay.keep_mib=1"],
    ],
)
def test_what_fits_together_passes(config_file, overrides):
    check_config(load_config(config_file, overrides))


# The model's folder


def test_a_missing_model_folder(config_file):
    message = machine_error(config_file, "model.path=models/none")
    assert f"model.path: models/none: no such folder (working directory: {os.getcwd()})" in message
    assert "make_tiny_model.py" in message


def test_a_file_is_no_model_folder(config_file):
    assert "is a file" in machine_error(config_file, f"model.path={config_file}")


def test_a_folder_without_config_json(config_file, model_folder):
    (model_folder / "config.json").unlink()
    assert f"model.path: {model_folder}: holds no config.json" in machine_error(config_file)


@pytest.mark.parametrize("text", ["{", "\x00"])
def test_a_damaged_config_json(config_file, model_folder, text):
    (model_folder / "config.json").write_text(text)
    assert f"model.path: {model_folder}/config.json: cannot be read as JSON" in machine_error(config_file)


@pytest.mark.parametrize("architectures", [["BertForMaskedLM"], [], None, "text"])
def test_a_model_that_is_no_causal_lm(config_file, model_folder, architectures):
    write_model_config(model_folder, architectures=architectures)
    message = machine_error(config_file)
    assert f"model.path: {model_folder}: config.json names" in message
    assert "expected an architecture ...ForCausalLM" in message


def test_a_folder_without_weights(config_file, model_folder):
    (model_folder / "model.safetensors").unlink()
    assert f"model.path: {model_folder}: holds no weights" in machine_error(config_file)


def test_a_folder_without_tokenizer(config_file, model_folder):
    (model_folder / "tokenizer.json").unlink()
    assert f"model.path: {model_folder}: holds no tokenizer" in machine_error(config_file)


def test_the_reference_model_is_checked_when_it_is_used(config_file):
    override = "algorithm.kl.reference_path=models/none"
    assert "algorithm.kl.reference_path: models/none: no such folder" in machine_error(
        config_file, override, "algorithm.kl.coefficient=0.1"
    )
    check_machine(load_config(config_file, [override]))


# Sizes


def test_prompt_and_response_must_fit_the_context(config_file, model_folder):
    write_model_config(model_folder, max_position_embeddings=199)
    message = machine_error(config_file)
    assert "rollout.max_response_tokens: 100, with data.max_prompt_tokens 100 that is 200 tokens" in message
    assert "context of 199" in message
    write_model_config(model_folder, max_position_embeddings=200)
    check_machine(load_config(config_file))


def test_the_kv_cache_holds_a_full_trajectory(config_file, model_folder):
    # 200 tokens are 7 blocks of 32, one more is vLLM's own; a token takes 2 * 256 * 2 * 32 * 4 bytes = 128 KiB.
    write_model_config(model_folder, num_hidden_layers=256)
    message = machine_error(config_file, "rollout.kv_cache_mib=31")
    assert "rollout.kv_cache_mib: 31; expected at least 32: one trajectory of full length has 200 tokens" in message
    check_machine(load_config(config_file, ["rollout.kv_cache_mib=32"]))
    check_machine(load_config(config_file, ["rollout.kv_cache_mib=16", "model.dtype=bfloat16"]))


def test_sizes_are_found_under_other_names(config_file, model_folder):
    # No head_dim, no num_key_value_heads: 128 / 4 = 32 a head, 4 of them: 256 KiB a token.
    write_model_config(model_folder, num_hidden_layers=256, head_dim=None, num_key_value_heads=None)
    assert "expected at least 64" in machine_error(config_file, "rollout.kv_cache_mib=63")


def test_vllm_on_a_cpu_has_few_head_sizes(config_file, model_folder, installed):
    write_model_config(model_folder, head_dim=48)
    overrides = ["launch.rollouts=local"]
    assert "head_dim is 48; vLLM on CPU can do 32, 64" in machine_error(config_file, *overrides, "rollout.engine=vllm")
    assert "head_dim is 48" in machine_error(config_file, *overrides, "rollout.engine=auto")
    check_machine(load_config(config_file, [*overrides, "rollout.engine=torch"]))
    installed.remove("vllm")
    check_machine(load_config(config_file, [*overrides, "rollout.engine=auto"]))


def test_tensor_parallel_divides_the_heads(config_file, installed):
    message = machine_error(config_file, "rollout.engine=vllm", "rollout.tensor_parallel=4")
    assert "rollout.tensor_parallel: 4; expected a divisor of the model's 2 KV heads" in message
    assert "attention heads" not in message
    check_machine(load_config(config_file, ["rollout.engine=vllm", "rollout.tensor_parallel=2"]))


def test_each_replica_may_have_a_degree_of_its_own(config_file):
    config = load_config(config_file, ["rollout.replicas=3", "rollout.tensor_parallel=[1, 4, 2]"])
    assert [config.rollout.degree(index) for index in range(4)] == [1, 4, 2, 2]
    assert config.rollout.largest_degree == 4
    assert load_config(config_file, ["rollout.tensor_parallel=2"]).rollout.degree(7) == 2
    assert "expected as many degrees as rollout.replicas (2)" in config_error(
        config_file, "rollout.tensor_parallel=[1, 1, 2]"
    )
    assert "all divide the largest (3), for which the weights are laid out; 2 does not" in config_error(
        config_file, "rollout.tensor_parallel=[2, 3]"
    )


def test_the_torch_engine_has_no_tensor_parallelism(config_file, installed):
    message = machine_error(config_file, "launch.rollouts=local", "rollout.tensor_parallel=2")
    assert "rollout.tensor_parallel: 2; the torch engine runs on one device" in message


@pytest.fixture
def mpi(installed, monkeypatch):
    """What is wrong with the MPI of this machine: nothing, unless a test says otherwise."""
    found: list[str] = []
    monkeypatch.setattr(mpi_installation, "problems", lambda: found)
    return found


def test_shared_memory_for_all_versions(config_file, model_folder, mpi, monkeypatch):
    # 17 weights of 4 bytes take 128 at the layout's alignment, the tied lm_head none; 2 versions and one that arrives,
    # 3 relays: 1152 bytes.
    write_safetensors(model_folder / "model.safetensors", {"embed.weight": [17], "lm_head.weight": [17]})
    overrides = ["launch.relays=local", "relay.count=3", "relay.keep_versions=2"]
    monkeypatch.setattr(machine, "free_shared_memory", lambda: 1151)
    message = machine_error(config_file, *overrides)
    assert (
        "relay.keep_versions: 2: 2 and one that arrives, of 128 bytes each in each of 3 relays on this host" in message
    )
    assert "need 1152 bytes of shared memory; /dev/shm has 1151;" in message
    assert "lower relay.keep_versions, or bound them by relay.keep_mib; lower relay.count; enlarge it" in message
    check_machine(load_config(config_file, overrides[1:]))  # relays of other hosts: not judged here
    monkeypatch.setattr(machine, "free_shared_memory", lambda: 1152)
    check_machine(load_config(config_file, overrides))
    write_safetensors(model_folder / "model-2.safetensors", {"second.weight": [7]})
    assert "of 192 bytes each" in machine_error(config_file, *overrides)


def test_no_version_fits_the_bound(config_file, model_folder):
    write_safetensors(model_folder / "model.safetensors", {"embed.weight": [1 << 18, 2]})
    message = machine_error(config_file, "relay.keep_mib=1")
    assert "relay.keep_mib: 1; expected at least 2, because one version of the weights has 2097152 bytes" in message
    check_machine(load_config(config_file, ["relay.keep_mib=2"]))
    check_machine(load_config(config_file, ["relay.keep_mib=1", "model.dtype=bfloat16"]))


def test_a_damaged_weight_file_is_left_to_the_loader(config_file, model_folder, mpi):
    (model_folder / "model.safetensors").write_bytes(b"\xff" * 20)
    check_machine(load_config(config_file, ["launch.relays=local", "relay.keep_mib=1"]))


# What is installed


def test_a_missing_engine_says_how_to_install_it(config_file, installed):
    installed.remove("vllm")
    message = machine_error(config_file, "launch.rollouts=local", "rollout.engine=vllm")
    assert "rollout.engine: vllm, but vLLM is not installed" in message
    assert "pip install 'laminar[cpu]'" in message


@pytest.mark.parametrize(
    ("module", "launch", "user"),
    [
        ("torch", "rollouts", "the rollouts"),
        ("transformers", "rollouts", "the rollouts"),
        ("torch", "trainer", "the trainer"),
        ("accelerate", "trainer", "the trainer"),
    ],
)
def test_missing_libraries_are_named(config_file, installed, module, launch, user):
    installed.remove(module)
    message = machine_error(config_file, f"launch.{launch}=local")
    assert f"{module} is not installed in this environment and {user} cannot start without it" in message
    assert "scripts/setup.sh" in message
    check_machine(load_config(config_file))  # started elsewhere: not needed here


def test_mpi_is_wanted_where_relays_are_started_over_it(config_file, mpi):
    mpi.append("the MPI is wrong")
    assert "the MPI is wrong" in machine_error(config_file, "launch.relays=local")
    check_machine(load_config(config_file, ["launch.relays=local", "relay.transport=tcp"]))
    check_machine(load_config(config_file))


# Data files


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return path


def test_the_prompt_file_must_exist(config_file, jsonl):
    overrides = [f"data.source={{type: jsonl, path: {jsonl}}}", "reward.function=exact"]
    check_machine(load_config(config_file, overrides))
    jsonl.write_text("")
    assert f"data.source.path: {jsonl}: empty" in machine_error(config_file, *overrides)
    jsonl.unlink()
    assert f"data.source.path: {jsonl}: no such file" in machine_error(config_file, *overrides)
    jsonl.mkdir()
    assert f"data.source.path: {jsonl}: is not a file" in machine_error(config_file, *overrides)

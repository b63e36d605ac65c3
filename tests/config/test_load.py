from __future__ import annotations

import pytest

from laminar.config.load import load_config, to_yaml
from laminar.errors import UserError


def error_of(path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_valid_file_loads_with_defaults(config_file):
    config = load_config(config_file)
    assert config.name == "example"
    assert config.rollout.temperature == 1.0
    assert config.data.source.datasets[0].params == {"min_word_len": 3}


def test_resolved_yaml_loads_back_to_the_same_config(config_file, tmp_path):
    config = load_config(config_file, ["trainer.optimizer.learning_rate=1e-4", "data.system_prompt='ä: \"#\\n'"])
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(again) == config


# The file itself


def test_a_missing_file_is_named(tmp_path):
    assert f"{tmp_path / 'none.yaml'}: no such file" in error_of(tmp_path / "none.yaml")


def test_a_folder_is_no_file(tmp_path):
    assert "cannot be read" in error_of(tmp_path)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert f"{path}: empty" in error_of(path)


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "list"), ("42\n", "single value")])
def test_a_file_that_is_no_mapping(tmp_path, text, kind):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert f"holds a {kind}; expected a mapping" in error_of(path)


def test_broken_yaml_is_located(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("name: a\ntrainer: {steps: 3\n")
    assert f"{path}:3:1: not valid YAML" in error_of(path)


def test_bytes_that_are_not_text(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"name: \xff\xfe\n")
    assert "not UTF-8" in error_of(path)


def test_tags_that_would_run_code_are_refused(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("name: !!python/object/apply:os.getcwd []\n")
    assert "not valid YAML" in error_of(path)


def test_a_key_that_is_there_twice_is_refused(config_file):
    config_file.write_text(config_file.read_text() + "trainer: {steps: 5}\n")
    assert "'trainer' is there twice" in error_of(config_file)


def test_a_nested_key_that_is_there_twice_is_refused(config_file):
    config_file.write_text(config_file.read_text() + "relay:\n  count: 1\n  count: 2\n")
    message = error_of(config_file)
    assert "'count' is there twice" in message
    assert f"{config_file}:14:3" in message


# Keys


def test_an_unknown_key_names_the_nearest(config_file):
    assert "trainer.step: unknown key; did you mean trainer.steps?" in error_of(config_file, "trainer.step=3")


def test_an_unknown_key_of_a_nested_section(config_file):
    message = error_of(config_file, "trainer.optimizer.learning_rat=1")
    assert "trainer.optimizer.learning_rat: unknown key; did you mean trainer.optimizer.learning_rate?" in message


def test_an_unknown_key_in_a_list_element(config_file):
    message = error_of(config_file, "data.source.datasets.0.nmae=x")
    assert "data.source.datasets.0.nmae: unknown key; did you mean data.source.datasets.0.name?" in message


def test_a_key_in_the_wrong_section_is_pointed_to_the_right_one(config_file):
    message = error_of(config_file, "trainer.max_staleness=1")
    assert "trainer.max_staleness: unknown key; did you mean schedule.max_staleness?" in message


def test_a_key_without_a_neighbour_lists_the_section(config_file):
    assert "reward.zzzzzz: unknown key; reward has the keys function, params, parts, workers" in error_of(
        config_file, "reward.zzzzzz=1"
    )


def test_an_unknown_section(config_file):
    assert "trainr: unknown key; did you mean trainer?" in error_of(config_file, "trainr.steps=1")


def test_a_key_of_the_other_source_lists_the_keys_of_this_one(config_file):
    message = error_of(config_file, "data.source.shuffle=true")
    assert "data.source.shuffle: unknown key; data.source has the keys type, datasets, seed, prompts" in message


def test_a_missing_key_says_what_it_is_for(config_file):
    message = error_of(config_file, "trainer={steps: 3, groups_per_step: 4}")
    assert (
        "trainer.group_size: missing; expected an integer, at least 1 (Trajectories per prompt; at least 2 for advant"
        in message
    )
    assert "--set trainer.group_size=" in message


def test_all_mistakes_are_told_at_once(config_file):
    message = error_of(config_file, "trainer.steps=0", "rollout.engine=vlm", "foo=1")
    assert "3 mistakes" in message
    assert all(key in message for key in ("trainer.steps: 0", 'rollout.engine: "vlm"', "foo: unknown key"))


# Values


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.steps=0", "trainer.steps: 0; expected an integer, at least 1"),
        ("trainer.steps=many", 'trainer.steps: "many"; expected an integer'),
        ("trainer.steps=2.5", "trainer.steps: 2.5; expected an integer"),
        ("trainer.steps=true", "trainer.steps: true; expected an integer"),
        ("trainer.steps='3'", 'trainer.steps: "3"; expected an integer'),
        ("trainer.steps=", "trainer.steps: null; expected an integer"),
        ("reward.workers=1000", "reward.workers: 1000; expected an integer, at least 1 and at most 256"),
        ("rollout.temperature=-1", "rollout.temperature: -1; expected a number, at least 0"),
        ("repack.kv_ceiling=0", "repack.kv_ceiling: 0; expected a number, above 0 and at most 1"),
        ("repack.kv_ceiling=1.01", "repack.kv_ceiling: 1.01; expected a number, above 0 and at most 1"),
        ("rollout.temperature=.nan", "rollout.temperature: NaN; expected a number"),
        ("rollout.temperature=.inf", "rollout.temperature: Infinity; expected a number"),
        (
            "rollout.engine=vlm",
            'rollout.engine: "vlm"; expected `auto` or `vllm` or `torch`; did you mean vllm? Change it in',
        ),
        ("rollout.engine=jax", 'rollout.engine: "jax"; expected `auto` or `vllm` or `torch`. Change it in'),
        ("schedule.name=one-step", "did you mean one_step?"),
        ("algorithm.kl.apply_to=rewards", "expected `loss` or `reward`; did you mean reward?"),
        ("data.source={type: jsonl, path: a, format: gsm-8k}", "did you mean gsm8k?"),
        ("data.source.type=huggingface", "did you mean hugging_face?"),
        ("name=a b", 'name: "a b"; expected text, matching'),
        ("name=2024", "name: 2024; expected text"),
        ("data.chat=1", "data.chat: 1; expected true or false"),
        ("trainer.optimizer.betas=[0.9]", "trainer.optimizer.betas: [0.9]; expected a list of 2 numbers"),
        ("trainer.optimizer.betas=[0.9, 1]", "trainer.optimizer.betas.1: 1; expected a number, at least 0 and below 1"),
        ("data.source.datasets=[]", "data.source.datasets: []; expected a list of sections"),
        ("data.source.datasets.0.weight=0", "data.source.datasets.0.weight: 0; expected a number, above 0"),
        (
            "data.source.datasets.0.params.a=null",
            "data.source.datasets.0.params.a: null; expected an integer or number",
        ),
        ("data.source.type=json", 'data.source.type: "json"; expected `reasoning_gym` or `jsonl`'),
        ("data.source={}", "data.source.type: missing; expected `reasoning_gym` or `jsonl`"),
        ("data.source=jsonl", 'data.source: "jsonl"; expected a section whose `type` is `reasoning_gym` or `jsonl`'),
        ("trainer=4", "trainer: 4; expected a section with the keys `ranks`"),
        ("reward=", "reward: null; expected a section with the keys `function`"),
    ],
)
def test_wrong_values_name_key_value_and_expectation(config_file, override, expected):
    assert expected in error_of(config_file, override)


def test_a_wrong_value_says_where_to_change_it(config_file):
    assert "Change it in the override --set trainer.steps=0" in error_of(config_file, "trainer.steps=0")
    config_file.write_text(config_file.read_text().replace("steps: 3", "steps: 0"))
    assert f"Change it in {config_file}" in error_of(config_file)


def test_a_long_value_is_cut(config_file):
    assert len(error_of(config_file, f"trainer.steps={'x' * 5000}")) < 6000
    config_file.write_text(config_file.read_text().replace("steps: 3", f"steps: {'x' * 5000}"))
    assert len(error_of(config_file)) < 500


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001"])
def test_numbers_may_be_written_with_an_exponent_and_no_point(config_file, text):
    assert load_config(config_file, [f"trainer.optimizer.learning_rate={text}"]).trainer.optimizer.learning_rate == 1e-4
    config = load_config(config_file, [f"data.source.datasets.0.params.p={text}"])
    assert config.data.source.datasets[0].params["p"] == 1e-4


def test_a_date_is_text(config_file):
    assert load_config(config_file, ["name=2024-01-01"]).name == "2024-01-01"

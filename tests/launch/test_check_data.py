from __future__ import annotations

import json
from pathlib import Path

import pytest

from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError
from laminar.launch.check_data import check_source


def config(source: dict[str, object], *, function: str = "exact", **data: object) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "test",
            "model": {"path": "model"},
            "data": {"source": source, **data},
            "reward": {"function": function},
            "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )


def jsonl(path: Path, *lines: dict[str, object]) -> dict[str, object]:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return {"type": "jsonl", "path": str(path)}


GYM = {"type": "reasoning_gym", "datasets": [{"name": "chain_sum"}]}


def test_good_configs_pass(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "data.jsonl", {"prompt": "a", "answer": "1", "topic": "x"})
    check_source(config(source, function="numeric", prompt_template="{topic}: {question}"))
    check_source(config(GYM, function="reasoning_gym"))


def test_a_template_field_that_only_some_lines_have(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", {"prompt": "a", "answer": "1", "topic": "x"}, {"prompt": "b", "answer": "2"})
    with pytest.raises(UserError, match=r"d\.jsonl:2: data\.prompt_template: no field 'topic'"):
        check_source(config(source, prompt_template="{topic}: {question}"))


@pytest.mark.parametrize("function", ["exact", "numeric"])
def test_built_in_rewards_need_answers(tmp_path: Path, function: str) -> None:
    source = jsonl(tmp_path / "d.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b", "solution": "2"})
    with pytest.raises(UserError, match=rf"d\.jsonl:2: reward.function {function} needs an answer.*'answer'.*solution"):
        check_source(config(source, function=function))


def test_numeric_needs_numbers(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", {"prompt": "a", "answer": "blue"})
    with pytest.raises(
        UserError, match=r"d\.jsonl:1: reward.function numeric needs a number in the answer, got 'blue'"
    ):
        check_source(config(source, function="numeric"))


def test_the_default_reward_does_not_fit_a_file(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", {"prompt": "a", "answer": "1"})
    with pytest.raises(UserError, match=r"reward\.function: reasoning_gym scores only .* data\.source\.type is jsonl"):
        check_source(config(source, function="reasoning_gym"))


def test_gym_faults_are_found_before_anything_starts() -> None:
    unknown = {"type": "reasoning_gym", "datasets": [{"name": "chain_summ"}]}
    with pytest.raises(UserError, match=r"datasets\[0\]\.name: .*chain_sum"):
        check_source(config(unknown, function="reasoning_gym"))
    with pytest.raises(UserError, match=r"data\.prompt_template: no field 'query'"):
        check_source(config(GYM, prompt_template="{query}"))
    with pytest.raises(UserError, match=r"data\.epochs: 3, but the generators never end; set data\.source\.prompts"):
        check_source(config(GYM, epochs=3))
    check_source(config({**GYM, "prompts": 5}, epochs=3))

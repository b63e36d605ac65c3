from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laminar.config.load import load_config
from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError
from laminar.launch.check_data import check_source


def config(
    source: dict[str, object], *, function: str = "exact", reward: dict[str, object] | None = None, **data: object
) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "test",
            "model": {"path": "model"},
            "data": {"source": source, **data},
            "reward": reward or {"function": function},
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


def test_columns_that_a_layout_needs_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", {"question": "a", "answer": "x #### 1"}, {"query": "b", "answer": "x #### 2"})
    with pytest.raises(
        UserError, match=r"d\.jsonl:2: format gsm8k needs the columns question; there are: query, answer"
    ):
        check_source(config({**source, "format": "gsm8k"}))


def test_parquet_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"query": ["a"], "answer": ["1"]}), tmp_path / "d.parquet")
    source = {"type": "parquet", "path": str(tmp_path / "d.parquet")}
    with pytest.raises(
        UserError, match=r"d\.parquet, row 1: no key 'prompt'; the keys are: query, answer\. Set .*prompt_field"
    ):
        check_source(config(source))
    check_source(config({**source, "prompt_field": "query"}))


def test_math_verify_needs_expressions(tmp_path: Path) -> None:
    check_source(config(jsonl(tmp_path / "d.jsonl", {"prompt": "a", "answer": "\\frac{1}{2}"}), function="math_verify"))
    source = jsonl(tmp_path / "d.jsonl", {"prompt": "a", "answer": "$$"})
    with pytest.raises(UserError, match=r"d\.jsonl:1: reward.function math_verify finds no .* in the answer '\$\$'"):
        check_source(config(source, function="math_verify"))


def test_code_needs_tests(tmp_path: Path) -> None:
    rows = {"prompt": "a", "test_list": ["assert f() == 1"]}
    parts = {"function": "code", "params": {"tests_field": "test_list"}}
    check_source(config(jsonl(tmp_path / "d.jsonl", rows), reward=parts))
    with pytest.raises(
        UserError, match=r"d\.jsonl:1: reward.function code: no tests under the key 'tests'; .* test_list"
    ):
        check_source(config(jsonl(tmp_path / "d.jsonl", rows), function="code"))


def test_conversations_need_chat(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    source = jsonl(tmp_path / "d.jsonl", {"prompt": messages, "answer": "1"})
    check_source(config(source, chat=True))
    with pytest.raises(
        UserError, match=r"d\.jsonl:1: data\.chat is false, but the prompt is a conversation of 2 messages"
    ):
        check_source(config(source))


def test_parts_name_sources_that_there_are_and_leave_none_out(tmp_path: Path) -> None:
    sums = {**jsonl(tmp_path / "sums.jsonl", {"prompt": "a", "answer": "1"}), "name": "sums"}
    poems = {**jsonl(tmp_path / "poems.jsonl", {"prompt": "b"}), "name": "poems"}
    mixture = {"type": "mixture", "sources": [{"source": sums}, {"source": poems}]}
    numeric, words = {"function": "numeric", "sources": ["sums"]}, {"function": "regex", "params": {"pattern": "a"}}
    check_source(config(mixture, reward={"parts": [numeric, {**words, "sources": ["poems"]}]}))
    with pytest.raises(UserError, match=r"reward\.parts\.1\.sources: no source is called 'poem'; did you mean poems\?"):
        check_source(config(mixture, reward={"parts": [numeric, {**words, "sources": ["poem"]}]}))
    with pytest.raises(UserError, match=r"reward\.parts: none of them is for the source 'poems'"):
        check_source(config(mixture, reward={"parts": [numeric]}))


def test_the_gsm8k_example_reads_rows_of_that_layout(tmp_path: Path) -> None:
    rows = {"question": ["Ann has 5 nuts and eats 2. How many are left?"], "answer": ["5 - 2 = <<5-2=3>>3\n#### 3"]}
    pq.write_table(pa.table(rows), tmp_path / "train-00000-of-00001.parquet")
    example = Path(__file__).parents[2] / "configs" / "gsm8k_smollm2.yaml"
    check_source(load_config(example, [f"data.source.path={tmp_path}"]))
    with pytest.raises(UserError, match=r"data\.source\.split: test; .* has the splits train"):
        check_source(load_config(example, [f"data.source.path={tmp_path}", "data.source.split=test"]))

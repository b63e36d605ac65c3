"""What can be said against a section `evaluation` before anything starts."""

import pytest

from laminar.config.checks import check_config, check_machine
from laminar.config.held_out import held_out, longest_context
from laminar.config.schema import ExperimentConfig
from laminar.controller.environment_manager import ANSWER_SLACK_S, score_limit_s
from laminar.errors import UserError
from laminar.launch.check_data import check_held_out

GENERATORS = {"type": "reasoning_gym", "datasets": [{"name": "spell_backward"}]}


def experiment(evaluation, data=None, **sections):
    return ExperimentConfig.model_validate(
        {
            "name": "held-out",
            "model": {"path": "models/none"},
            "data": {"source": data or GENERATORS, "max_prompt_tokens": 8},
            "rollout": {"max_response_tokens": 4},
            "trainer": {"steps": 1, "groups_per_step": 2, "group_size": 2},
            "evaluation": evaluation,
            **sections,
        }
    )


def problem_of(config):
    with pytest.raises(UserError) as failure:
        check_config(config)
    return str(failure.value)


def test_a_run_without_evaluation_is_checked_as_ever():
    check_config(experiment(None))
    check_held_out(experiment(None))


def test_the_prompts_that_are_trained_on_are_not_held_out():
    """Another order or another number of the same prompts does not make them others; another seed does."""
    same = "evaluation.source: the same as data.source"
    assert same in problem_of(experiment({"source": GENERATORS}))
    assert same in problem_of(experiment({"source": GENERATORS | {"seed": 0, "prompts": 20}}))  # 0: the experiment's
    check_config(experiment({"source": GENERATORS | {"seed": 1}}))
    lines = {"type": "jsonl", "path": "train.jsonl"}
    reward = {"function": "exact"}
    assert same in problem_of(experiment({"source": lines | {"shuffle": False}}, lines, reward=reward))
    check_config(experiment({"source": lines | {"path": "test.jsonl"}}, lines, reward=reward))


def test_greedy_responses_are_all_the_same():
    held = {"source": GENERATORS | {"seed": 1}, "samples": 4}
    assert "evaluation.samples: 4; with evaluation.temperature 0 (greedy)" in problem_of(experiment(held))
    check_config(experiment(held | {"temperature": 1.0}))


def test_what_is_said_of_the_reward_names_the_evaluations_keys():
    held = {"source": {"type": "jsonl", "path": "test.jsonl"}}
    message = problem_of(experiment(held))
    assert "evaluation.reward.function: reasoning_gym" in message
    assert "evaluation.source.type is jsonl" in message
    assert "did you mean exact?" in problem_of(experiment(held | {"reward": {"function": "exakt"}}))
    check_config(experiment(held | {"reward": {"function": "exact"}}))
    wrong = {"function": "regex", "params": {"patern": "x"}}
    assert "evaluation.reward.params.patern: regex has no such option" in problem_of(
        experiment(held | {"reward": wrong})
    )
    wrong = {"parts": [{"function": "exact"}, {"function": "exact"}]}
    assert "evaluation.reward.parts.1.name: exact: another part" in problem_of(experiment(held | {"reward": wrong}))


def test_its_data_is_read_before_the_start(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text('{"prompt": "1 + 1", "answer": "two"}\n')
    held = {"source": {"type": "jsonl", "path": str(file)}, "reward": {"function": "numeric"}}
    with pytest.raises(UserError, match=r"evaluation.reward.function numeric needs a number") as failure:
        check_held_out(experiment(held))
    assert "test.jsonl" in str(failure.value)
    file.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    check_held_out(experiment(held))


def test_evaluation_sees_its_own_prompts_and_reward_and_the_rest_as_it_is():
    config = experiment(
        {"source": GENERATORS | {"seed": 1}}, trainer={"steps": 1, "groups_per_step": 2, "group_size": 2}
    )
    view = held_out(config)
    assert view.data.source == config.evaluation.source
    assert view.reward == config.reward
    assert view.data.max_prompt_tokens == config.data.max_prompt_tokens


def test_evaluation_may_add_up_rewards_of_its_own_and_keeps_the_limits_of_training():
    parts = [{"function": "numeric"}, {"function": "length_penalty", "weight": 0.1, "timeout_s": 90}]
    held = {"source": {"type": "jsonl", "path": "test.jsonl"}, "reward": {"parts": parts}}
    config = experiment(held, reward={"function": "reasoning_gym", "timeout_s": 5, "workers": 3})
    check_config(config)
    reward = held_out(config).reward
    assert (reward.title, reward.function) == ("numeric + length_penalty", None)
    assert [reward.limit_s(part) for part in reward.terms()] == [5, 90]
    assert reward.workers == 3
    assert score_limit_s(config) == 90 + ANSWER_SLACK_S  # no worker is given up while it still scores


def test_a_missing_file_that_both_would_read_is_told_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    reward = {"function": "reward_model", "params": {"path": "models/judge"}}
    with pytest.raises(UserError) as failure:
        check_machine(experiment({"source": GENERATORS | {"seed": 1}}, reward=reward))
    assert str(failure.value).count("models/judge: no Hugging Face model there") == 1
    with pytest.raises(UserError, match=r"evaluation.reward.params.path: models/judge: no Hugging Face model"):
        check_machine(experiment({"source": GENERATORS | {"seed": 1}, "reward": reward}))


def test_a_longer_response_than_training_has_needs_more_context():
    held = {"source": GENERATORS | {"seed": 1}}
    assert longest_context(experiment(None)) == longest_context(experiment(held)) == 12
    assert longest_context(experiment(held | {"max_response_tokens": 9})) == 17
    assert longest_context(experiment(held | {"max_response_tokens": 1})) == 12

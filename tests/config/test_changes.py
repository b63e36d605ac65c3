"""What may change when a run is resumed."""

import pytest

from laminar.config.changes import READ_BY, RULES, changes, check_changes, rule
from laminar.config.describe import all_keys
from laminar.config.schema import ExperimentConfig, LaunchConfig
from laminar.errors import UserError
from tests.controller.fake_workers import experiment


@pytest.mark.parametrize(
    "key",
    [
        *("trainer.optimizer.learning_rate", "trainer.steps", "trainer.restarts", "trainer.checkpoint_every"),
        *("rollout.replicas", "rollout.restarts", "relay.count", "controller.port", "schedule.max_staleness"),
        *("rollout.drain_s", "rollout.silence_limit_s", "evaluation.every", "evaluation.share"),
    ],
)
def test_what_is_safe_may_change(key):
    assert rule(key) is None


@pytest.mark.parametrize(
    "key",
    [
        *("model.path", "model.dtype", "data.source", "data.source.path", "seed", "name", "trainer.group_size"),
        *("rollout.temperature", "rollout.max_response_tokens", "schedule.name", "reward.function"),
        *("evaluation.source.path", "evaluation.samples", "evaluation.reward.function"),
        "a.section.of.tomorrow",
    ],
)
def test_what_decides_about_the_past_may_not(key):
    assert rule(key)


def test_every_key_has_a_rule():
    assert all(rule(key) is None or len(rule(key)) > 10 for key in all_keys(ExperimentConfig))


def test_every_rule_is_about_a_key():
    keys = list(all_keys(ExperimentConfig))
    assert not [name for name in RULES if name and not any(f"{key}.".startswith(f"{name}.") for key in keys)]


def test_what_workers_read_are_sections():
    sections = {key.partition(".")[0] for key in all_keys(ExperimentConfig)}
    assert READ_BY.keys() == LaunchConfig.model_fields.keys()
    assert all(section in sections for read in READ_BY.values() for section in read)


def test_changes_are_named_with_both_values():
    before, after = experiment(), experiment(trainer__steps=9, seed=4)
    assert changes(before, after) == [("seed", 0, 4), ("trainer.steps", 3, 9)]
    with pytest.raises(UserError, match="seed: 4; a resumed run must keep 0"):
        check_changes(before, after)
    assert check_changes(before, experiment(trainer__steps=9)) == [("trainer.steps", 3, 9)]

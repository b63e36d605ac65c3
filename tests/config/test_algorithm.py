from __future__ import annotations

import pytest

from laminar.config.algorithm import aggregation, clips, correction, critic
from laminar.config.algorithm_schema import AlgorithmConfig
from laminar.config.checks import check_config, check_machine
from laminar.config.load import load_config
from tests.config.test_checks import config_error, installed, machine_error  # noqa: F401


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["advantage=grop"], 'algorithm.advantage: "grop"; expected grpo, dr_grpo, rloo, reinforce++, gae or'),
        (["advantage=grop"], "did you mean grpo?"),
        (["advantage=reinforce"], "did you mean reinforce++?"),
        (["advantage=mine.f"], "a colon stands between module and function"),
        (["loss=gpso"], 'algorithm.loss: "gpso"; expected ppo, dapo, gspo, cispo, decoupled_ppo or'),
        (["loss=decoupled"], "did you mean decoupled_ppo?"),
        (["critic={}"], "algorithm.critic: given, but algorithm.advantage is grpo, which needs no values"),
        (["gae_lambda=0.9"], "algorithm.gae_lambda: 0.9; only `gae` has one, algorithm.advantage is grpo"),
        (["gamma=0.9"], "algorithm.gamma: 0.9; only `gae` and `reinforce++` discount"),
        (["dual_clip=3"], "algorithm.dual_clip: 3; algorithm.loss dapo has none, only ppo; remove it"),
        (["loss=ppo", "dual_clip=1.1"], "algorithm.dual_clip: 1.1; expected above 1 + clip_high (1.2)"),
        (["behavior_cap=5"], "algorithm.behavior_cap: 5; algorithm.loss dapo has none, only decoupled_ppo"),
        (["loss=a:b", "clip_low=0.1"], "algorithm.clip_low: 0.1; algorithm.loss a:b has none"),
        (
            ["loss=decoupled_ppo", "old_policy=behavior"],
            "algorithm.old_policy: behavior; decoupled_ppo takes its ratio",
        ),
        (["loss=decoupled_ppo", "correction.method=tis"], "decoupled_ppo corrects for the engine already"),
        (["old_policy=behavior", "correction.method=mis"], "a ratio against the behavior policy corrects"),
        (["correction.method=none", "correction.cap=3"], "algorithm.correction: level, cap or floor is given, but no"),
        (["correction.floor=0.5"], "algorithm.correction.floor: 0.5; only `mis` has one"),
        (
            ["correction={method: mis, floor: 2}"],
            "algorithm.correction.floor: 2; expected below algorithm.correction.cap",
        ),
        (["overlong.buffer_tokens=101"], "algorithm.overlong.buffer_tokens: 101; expected at most rollout.max_resp"),
    ],
)
def test_contradictions_name_the_key(config_file, overrides, expected):
    assert expected in config_error(config_file, *(f"algorithm.{override}" for override in overrides))


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_has_nothing_to_compare(config_file, advantage):
    error = config_error(config_file, "trainer.group_size=1", f"algorithm.advantage={advantage}")
    assert f"trainer.group_size: 1; algorithm.advantage {advantage} compares the trajectories of a group" in error
    assert "use algorithm.advantage: reinforce++ or gae" in error


def test_a_group_of_one_has_no_variance(config_file):
    overrides = ["trainer.group_size=1", "algorithm.advantage=gae"]
    check_config(load_config(config_file, overrides))
    error = config_error(config_file, *overrides, "algorithm.dynamic_sampling.enabled=true")
    assert "algorithm.dynamic_sampling.enabled: true; with trainer.group_size 1" in error


@pytest.mark.parametrize(
    "overrides",
    [
        ["advantage=gae", "critic={clip: null}", "gae_lambda=0.95", "gamma=0.99"],
        ["advantage=reinforce++", "gamma=0.99"],
        ["loss=ppo", "dual_clip=3", "clip_high=0.3"],
        ["loss=decoupled_ppo", "behavior_cap=5", "correction.method=none"],
        ["loss=cispo", "old_policy=behavior", "clip_low=1.0"],
        ["loss=mine.losses:best", "advantage=mine:best"],
        ["correction={method: mis, level: geometric, floor: 0.99, cap: 1.01}"],
        ["overlong.buffer_tokens=100"],
        ["kl={coefficient: 0.1, apply_to: reward, estimator: k1}"],
    ],
)
def test_what_goes_together_passes(config_file, overrides):
    check_config(load_config(config_file, [f"algorithm.{override}" for override in overrides]))


def test_what_null_stands_for():
    def of(**settings):
        return AlgorithmConfig.model_validate(settings)

    assert clips(of()) == (0.2, 0.28)
    assert clips(of(loss="ppo", clip_high=0.25)) == (0.2, 0.25)
    assert clips(of(loss="gspo")) == (3e-4, 4e-4)
    assert aggregation(of(loss="gspo")) == "trajectory"
    assert aggregation(of(loss="gspo", aggregation="token")) == aggregation(of()) == "token"
    assert correction(of()) == correction(of(loss="mine:f")) == "tis"
    assert correction(of(loss="decoupled_ppo")) == correction(of(old_policy="behavior")) == "none"
    assert critic(of()) is None
    assert critic(of(advantage="gae")).optimizer.learning_rate == 1e-5


@pytest.mark.usefixtures("installed")
class TestMachine:
    def test_models_beside_the_trained_one_are_looked_for(self, config_file):
        error = machine_error(
            config_file, "algorithm.kl={coefficient: 0.1, reference_path: models/a}", "algorithm.advantage=gae"
        )
        assert "algorithm.kl.reference_path: models/a: no such folder" in error
        error = machine_error(config_file, "algorithm.critic.path=models/b", "algorithm.advantage=gae")
        assert "algorithm.critic.path: models/b: no such folder" in error

    def test_own_functions_are_looked_for_without_running_them(self, config_file, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mine.py").write_text("raise SystemExit\ndef advantage(batch): ...\ndef loss(tokens): ...\n")
        own = ["algorithm.advantage=mine:advantage", "algorithm.loss=mine:loss"]
        check_machine(load_config(config_file, own))
        error = machine_error(config_file, "algorithm.advantage=mine:advantages", "algorithm.loss=min:loss")
        assert "algorithm.advantage: mine:advantages: mine has no 'advantages'; its functions are: advantage" in error
        assert "algorithm.loss: min:loss: there is no module min in the working directory" in error
        (tmp_path / "mine.py").write_text("def loss(:\n")
        assert "mine.py:1: " in machine_error(config_file, "algorithm.loss=mine:loss")

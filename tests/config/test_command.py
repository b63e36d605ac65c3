from __future__ import annotations

import pytest

from laminar.cli import main
from laminar.config.command import show
from laminar.config.load import load_config


def test_check_prints_one_line_with_a_summary(config_file, model_folder, capsys):
    assert main(["config", "check", str(config_file), "--set", "trainer.steps=7"]) == 0
    assert capsys.readouterr().out == (
        f"{config_file}: OK, example: model {model_folder} in float32, engine torch x 2 replicas, "
        "7 steps of 16 trajectories (4 groups x 4)\n"
    )


@pytest.mark.parametrize("override", ["trainer.mini_batches=3", "model.path=models/none", "trainer.step=3"])
def test_check_says_what_is_wrong_and_exits_with_2(config_file, override, capsys):
    assert main(["config", "check", str(config_file), "--set", override]) == 2
    error = capsys.readouterr().err
    assert error.startswith("laminar: ")
    assert override.partition("=")[0] in error


def test_show_prints_a_config_that_loads_to_the_same(config_file, tmp_path, capsys):
    overrides = ["trainer.steps=7", "trainer.optimizer.learning_rate=1e-5"]
    assert show(str(config_file), overrides) == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    assert load_config(shown) == load_config(config_file, overrides)


def test_show_works_where_the_model_is_not(config_file, capsys):
    assert show(str(config_file), ["model.path=models/none"]) == 0
    assert "path: models/none" in capsys.readouterr().out

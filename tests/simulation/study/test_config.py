from __future__ import annotations

from pathlib import Path

import pytest

from laminar.config.load import to_yaml
from laminar.errors import UserError
from laminar.simulation.study.config import load_study
from laminar.simulation.study.plan import plan_cases
from tests.simulation.study_files import study_file

SHIPPED = sorted((Path(__file__).parents[3] / "configs" / "simulation").glob("*.yaml"))


def error_of(folder, *overrides):
    with pytest.raises(UserError) as caught:
        load_study(study_file(folder), overrides)
    return str(caught.value)


def test_the_defaults_are_the_papers_batch_and_gpu(tmp_path):
    config = load_study(study_file(tmp_path), ["batch={}"])
    assert (config.batch.groups_per_step, config.batch.group_size, config.batch.mini_batches) == (512, 16, 4)
    assert config.hardware.gpu == "H800"
    assert config.hardware.nic_gbit_s == 400


def test_the_resolved_config_loads_back(tmp_path):
    config = load_study(study_file(tmp_path), ["schedules=[laminar, {name: one_step, max_staleness: 2}]", "split=0.25"])
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config), encoding="utf-8")
    assert load_study(again) == config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("size=3", "size: unknown key; did you mean sizes?"),
        ("schedules=[lamina]", 'schedules.0: "lamina"; expected `laminar` or `synchronous`'),
        ("schedules=[{name: lamina}]", 'schedules.0.name: "lamina"; expected `laminar` or `synchronous`'),
        ("schedules=[]", "at least 1 of them"),
        ("sizes=[]", "sizes: []; expected a list of integers"),
        ("sizes=[0]", "sizes.0: 0; expected an integer, at least 1"),
        ("models=[]", "at least 1 of them"),
        ("steps=0", "steps: 0; expected an integer, at least 1"),
        ("split=1.5", "split: 1.5; expected `auto` or `shared`"),
        ("split=half", 'split: "half"; expected `auto` or `shared`'),
        ("hardware.gpu={name: X}", "hardware.gpu.memory_gb: missing"),
        ("workload.lengths=1000", "workload.lengths: 1000; expected a section with the keys `median`"),
        ("workload.group_correlation=2", "workload.group_correlation: 2; expected a number, at least 0 and at most 1"),
        ("name=a b", 'name: "a b"; expected text, matching'),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(tmp_path, override, says):
    assert says in error_of(tmp_path, override)


def test_inside_of_a_section_only_its_own_mistakes_are_named(tmp_path):
    """A GPU may also be text, but whoever writes a section wants to hear of its keys."""
    assert "expected text" not in error_of(tmp_path, "hardware.gpu={name: X}")


def test_a_missing_file_points_to_the_examples(tmp_path):
    with pytest.raises(UserError, match="no such file; expected a simulation config in YAML .*configs/simulation/"):
        load_study(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_study_can_be_run(path, monkeypatch):
    monkeypatch.chdir(path.parents[2])
    config = load_study(path)
    assert config.name == path.stem
    assert plan_cases(config)


def test_the_papers_studies_are_shipped():
    assert {"quick", "paper_math", "paper_tools", "my_lengths"} <= {path.stem for path in SHIPPED}

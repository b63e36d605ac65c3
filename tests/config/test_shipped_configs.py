from __future__ import annotations

from pathlib import Path

import pytest

from laminar.config.checks import check_config
from laminar.config.load import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
STUDIES = CONFIGS / "simulation"  # tests/simulation/study/test_config.py loads them
FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if STUDIES not in path.parents)


def test_there_are_configs_and_they_all_end_in_yaml():
    assert {"quickstart.yaml", "smollm2_135m.yaml"} <= {path.name for path in FILES}
    assert list(CONFIGS.rglob("*.yml")) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path):
    config = load_config(path)
    check_config(config)
    assert config.name.replace("-", "_") == path.stem.replace("-", "_")

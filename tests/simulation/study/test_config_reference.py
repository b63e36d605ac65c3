from __future__ import annotations

from pathlib import Path

from laminar.config.describe import all_keys
from laminar.simulation.study.config import SimulationConfig
from laminar.simulation.study.config_reference import reference

DOCUMENT = Path(__file__).parents[3] / "docs" / "simulation-configuration.md"


def test_the_committed_reference_is_current():
    assert DOCUMENT.read_text(encoding="utf-8") == reference(), (
        "run: python -m laminar.simulation.study.config_reference > docs/simulation-configuration.md"
    )


def test_every_key_is_in_the_reference_with_a_meaning():
    page = reference()
    assert [key for key in all_keys(SimulationConfig) if f"| `{key}` |" not in page] == []
    assert [row for row in page.splitlines() if row.startswith("| `") and row.endswith("|  |")] == []
    assert "| `models.N.tensor_parallel` | integer, at least 1 and at most 64, or null | `null` |" in page

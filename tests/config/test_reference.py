from __future__ import annotations

from pathlib import Path

from laminar.config.describe import all_keys
from laminar.config.reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_reference_is_current():
    assert DOCUMENT.read_text(encoding="utf-8") == reference(), (
        "run: python -m laminar.config.reference > docs/configuration.md"
    )


def test_every_key_is_in_the_reference():
    page = reference()
    # Held-out prompts come from the same kinds of sources: their keys are listed once, under data.source.
    keys = [key.replace("evaluation.source.", "data.source.") for key in all_keys()]
    assert [key for key in keys if f"| `{key}` |" not in page] == []
    assert "| `data.source.datasets.N.weight` | number, above 0 | `1.0` |" in page


def test_every_key_has_a_meaning():
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |") and not row.split("|")[1].strip().endswith(".type`")] == []

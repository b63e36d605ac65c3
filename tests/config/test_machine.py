from __future__ import annotations

import sys

from laminar.config import machine


def test_mpirun_is_taken_from_the_environment_first(tmp_path, monkeypatch):
    (tmp_path / "env").mkdir()
    (tmp_path / "path").mkdir()
    for folder in ("env", "path"):
        (tmp_path / folder / "mpirun").write_text("#!/bin/sh\n")
        (tmp_path / folder / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert machine.find_mpirun() == tmp_path / "env" / "mpirun"
    (tmp_path / "env" / "mpirun").unlink()
    assert machine.find_mpirun() == tmp_path / "path" / "mpirun"
    (tmp_path / "path" / "mpirun").unlink()
    assert machine.find_mpirun() is None


def test_modules_are_found_without_importing_them():
    assert machine.has_module("lib2to3") or machine.has_module("this")
    assert "this" not in sys.modules
    assert not machine.has_module("no_such_module_anywhere")


def test_free_shared_memory_is_that_of_the_file_system(tmp_path):
    assert machine.free_shared_memory(tmp_path) > 0

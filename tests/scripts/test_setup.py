"""scripts/setup.sh where it installs nothing: mistakes, and an environment that is made already."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    """What setup.sh looks at, without an environment."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()  # the system's libraries are not the subject: none shall be installed
    (tmp_path / "bin" / "ldconfig").write_text("#!/bin/sh\necho libnuma.so.1\n")
    (tmp_path / "bin" / "ldconfig").chmod(0o755)
    return tmp_path


def setup(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(checkout / "scripts" / "setup.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", **variables},
        check=False,
    )


def test_no_python_of_a_version_that_works(checkout):
    old = checkout / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = setup(checkout, LAMINAR_PYTHON=str(old), LAMINAR_DEVICE="cpu")
    assert done.returncode == 1
    assert f"found no python 3.11 or 3.12 (tried: {old})" in done.stderr
    assert not (checkout / ".venv").exists()


def python(folder: Path, *, optimized: bool) -> Path:
    """An interpreter that says of itself what setup.sh asks for, and makes no environment."""
    folder.mkdir(exist_ok=True)
    file = folder / "python3.11"
    answer = (
        f'case "$2" in *enable-optimizations*) exit {int(not optimized)};; *"%d.%d"*) echo 3.11;; venv) exit 1;; esac'
    )
    file.write_text(f"#!/bin/sh\n{answer}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("first, second, taken", [(False, True, 1), (True, False, 0), (True, True, 0)])
def test_a_python_that_was_built_with_optimizations_is_preferred(checkout, first, second, taken):
    pythons = python(checkout / "bin", optimized=first), python(checkout / "more", optimized=second)
    path = f"{checkout / 'bin'}:{checkout / 'more'}:{os.environ['PATH']}"
    done = setup(checkout, PATH=path, LAMINAR_DEVICE="cpu")
    assert f"making .venv with {pythons[taken]} (3.11)" in done.stdout


def test_one_that_is_named_is_taken_as_it_is(checkout):
    python(checkout / "bin", optimized=True)
    slow = python(checkout / "more", optimized=False)
    done = setup(checkout, LAMINAR_PYTHON=str(slow), LAMINAR_DEVICE="cpu")
    assert f"making .venv with {slow} (3.11, built without optimizations or not complete)" in done.stdout


def test_an_unknown_device(checkout):
    done = setup(checkout, LAMINAR_DEVICE="tpu")
    assert done.returncode == 1
    assert "LAMINAR_DEVICE: tpu; expected cpu or gpu" in done.stderr


def test_an_unknown_option_shows_the_usage(checkout):
    done = setup(checkout, "--all")
    assert done.returncode == 2
    assert "bash scripts/setup.sh --dev" in done.stdout


def stub_environment(checkout: Path) -> Path:
    """An environment whose python notes that pip was called, and does nothing."""
    bin_folder = checkout / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    python = bin_folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *" pip "*install*) echo "$*" >>{checkout}/calls;; "-m pip --version") ;; "-c import pycosat") ;;\n'
        f'*) exec {sys.executable} "$@";; esac\n'
    )
    python.chmod(0o755)
    return checkout / "calls"


def test_what_is_done_is_not_done_again(checkout):
    calls = stub_environment(checkout)
    cpu = {"LAMINAR_DEVICE": "cpu"}
    assert setup(checkout, **cpu).returncode == 0
    assert "-r requirements/cpu.lock" in calls.read_text()
    assert "dev.lock" not in calls.read_text()
    calls.unlink()
    assert "already done (cpu, run)" in setup(checkout, **cpu).stdout
    assert not calls.exists()
    assert setup(checkout, "--dev", **cpu).returncode == 0
    assert "-r requirements/dev.lock" in calls.read_text()
    calls.unlink()
    assert "already done (cpu, dev)" in setup(checkout, "--dev", **cpu).stdout
    assert "already done (cpu, run)" in setup(checkout, **cpu).stdout
    assert not calls.exists()


def test_a_changed_lock_is_installed_again(checkout):
    calls = stub_environment(checkout)
    assert setup(checkout, LAMINAR_DEVICE="cpu").returncode == 0
    calls.unlink()
    with (checkout / "requirements" / "cpu.lock").open("a") as lock:
        lock.write("# changed\n")
    assert setup(checkout, LAMINAR_DEVICE="cpu").returncode == 0
    assert calls.exists()


def test_a_failed_install_shows_the_end_of_its_log(checkout):
    stub_environment(checkout)
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(python.read_text().replace(f'echo "$*" >>{checkout}/calls', "echo no space left; exit 1"))
    done = setup(checkout, LAMINAR_DEVICE="gpu")
    assert done.returncode == 1
    assert "no space left" in done.stderr
    assert "failed: .venv/bin/python -m pip" in done.stderr
    assert list((checkout / ".venv").glob(".laminar-*")) == []


def test_torch_is_taken_from_its_own_index_where_there_is_no_cpu_build(checkout):
    calls = stub_environment(checkout)
    python = checkout / ".venv" / "bin" / "python"
    only_there = f'*"--index-url"*"+cpu") echo "$*" >>{checkout}/calls;; *"+cpu") exit 1;; *" pip "*install*)'
    python.write_text(python.read_text().replace('*" pip "*install*)', only_there))
    assert setup(checkout, LAMINAR_DEVICE="cpu", LAMINAR_TORCH_INDEX="file:///mirror").returncode == 0
    assert "install --no-deps --index-url file:///mirror torch==2.13.0+cpu" in calls.read_text()

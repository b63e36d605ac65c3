"""A run's folder in shared memory: who owns it, and what may be removed when the owner is dead.

Invariant: a folder is removed only by its run, or when the process that claimed it is known to have ended. A process is
told by pid and start time, so a reused pid does not keep a dead run's memory; a folder whose owner lives in another
pid namespace (a container that shares /dev/shm), or that nobody claimed, is not judged and stays.

Everything that a run keeps in shared memory, Open MPI's files included, lies in this folder.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from pathlib import Path

from laminar.errors import UserError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "laminar-"
OWNER_FILE = "owner"

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
# A folder between two names: being claimed, or being removed, by the process that the name states.
_PASSING = re.compile(re.escape(f".{PREFIX}") + r".+~(?P<owner>\d+ \d+ \d+)")
_counter = itertools.count()


def run_directory(run_id: str, base: Path = SHARED_MEMORY) -> Path:
    """The run's folder. Raises ValueError for an id that is no plain file name."""
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"run id {run_id!r}: expected letters, digits, '_', '.' or '-', at most 100")
    return base / f"{PREFIX}{run_id}"


def claim(run_id: str, base: Path = SHARED_MEMORY) -> Path:
    """Create the run's folder (mode 0700) in the name of this process and return it.

    A dead run's folder of the same name is removed first.

    Raises:
        UserError: a live run has this id.
    """
    directory = run_directory(run_id, base)
    _remove_if_dead(directory)
    if not _create(directory):
        raise UserError(
            f"{directory} belongs to a run that is still alive (owner: process {_owner(directory)}); "
            "stop that run, choose another run directory, or remove the folder by hand"
        )
    return directory


def attach(run_id: str, base: Path = SHARED_MEMORY) -> Path:
    """The run's folder; on a host without the controller, where nobody has claimed it yet, claim it for this process."""
    directory = run_directory(run_id, base)
    if not directory.is_dir():
        _create(directory)  # False: another worker of the run was faster
    return directory


def remove(run_id: str, base: Path = SHARED_MEMORY) -> None:
    """Remove the run's folder with all that is in it. Does nothing if it is not there."""
    _remove(run_directory(run_id, base))


def take_over(run_id: str, base: Path = SHARED_MEMORY) -> Path:
    """The run's folder, in the name of this process: made if it is not there, else with all that is in it.

    Raises:
        UserError: its owner is alive.
    """
    directory = run_directory(run_id, base)
    owner = _owner(directory)
    if owner is not None and not _is_dead(owner):
        raise UserError(
            f"{directory} belongs to a run that is still alive (owner: process {owner}); stop that run first"
        )
    if not _create(directory):
        temporary = directory / f".{OWNER_FILE}"
        temporary.write_text(f"{_identity(os.getpid())}\n", encoding="ascii")
        temporary.rename(directory / OWNER_FILE)
    return directory


def remove_leftovers(base: Path = SHARED_MEMORY, *, but: str = "") -> list[str]:
    """Remove the folders of runs whose owner is dead and return their names, for a message to the user.

    `but`: a run that is about to be taken over.
    """
    removed = []
    for path in sorted(base.iterdir()):
        if not path.name.startswith((PREFIX, f".{PREFIX}")) or path.is_symlink() or not path.is_dir():
            continue
        if but and path == run_directory(but, base):
            continue
        if path.stat().st_uid == os.getuid() and _remove_if_dead(path):
            removed.append(path.name)
    return removed


def _create(directory: Path) -> bool:
    """Make the folder, with this process as its owner, in one step; False if there is one already."""
    staged = _passing_name(directory)
    staged.mkdir(mode=0o700)
    try:
        (staged / OWNER_FILE).write_text(f"{_identity(os.getpid())}\n", encoding="ascii")
        os.rename(staged, directory)  # fails unless the target is absent or an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return True


def _remove_if_dead(directory: Path) -> bool:
    owner = _owner(directory)
    if owner is None or not _is_dead(owner):
        return False
    return _remove(directory, owner)


def _remove(directory: Path, owner: str | None = None) -> bool:
    """Move the folder aside, then delete: a half-deleted folder still says by its name whose it is.

    With an owner given, a folder that another run has claimed meanwhile is put back.
    """
    aside = _passing_name(directory)
    try:
        os.rename(directory, aside)
    except FileNotFoundError:
        return False
    claimed = aside / OWNER_FILE
    if owner is not None and claimed.exists() and claimed.read_text(encoding="ascii").strip() != owner:
        os.rename(aside, directory)
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _passing_name(directory: Path) -> Path:
    plain = directory.name.split("~")[0].removeprefix(".")
    return directory.with_name(f".{plain}~{next(_counter)}~{_identity(os.getpid())}")


def _owner(directory: Path) -> str | None:
    if match := _PASSING.fullmatch(directory.name):
        return match["owner"]
    try:
        return (directory / OWNER_FILE).read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_dead(owner: str) -> bool:
    """Whether "pid start-time pid-namespace" names a process of our pid namespace that has ended."""
    match = re.fullmatch(r"(\d+) \d+ (\d+)", owner)
    if match is None or match[2] != _pid_namespace():
        return False
    return _identity(int(match[1])) != owner


def _identity(pid: int) -> str:
    """The process as "pid start-time pid-namespace"; start time in clock ticks since boot, 0 if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid} 0 {_pid_namespace()}"
    state, *fields = stat.rpartition(")")[2].split()  # the command name before it may hold spaces and brackets
    started = "0" if state in "ZX" else fields[18]  # a zombie has ended
    return f"{pid} {started} {_pid_namespace()}"


def _pid_namespace() -> str:
    """Number of our pid namespace, "0" where /proc does not tell."""
    try:
        return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid")) or "0"
    except OSError:
        return "0"

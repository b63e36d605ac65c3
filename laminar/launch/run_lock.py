"""One live run per run directory: a lock that the process holds which a person has started, and that ends with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from laminar.errors import UserError

LOCK = "lock"


class RunLock:
    """Held from `acquire` until `release`, or the end of the process."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._descriptor = -1

    def acquire(self) -> None:
        """Raises UserError if a run lives in the folder, or it cannot be written."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            folder = self._path.parent
            raise UserError(
                f"{folder}: the run of process {owner or '?'} lives there. End that run first "
                f"(laminar attach {folder} -c stop), or choose another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """May be called again."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

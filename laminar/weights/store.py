"""The versioned weight store: a file per version in shared memory (`version_file.py`).

Invariants: a version is visible only when it is complete, never changes afterwards, and never comes back once it is
gone; at most one process writes into a store, any number read.

Imports no torch: relays use it too. `laminar.weights.tensors` gives torch views.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

from laminar.errors import UserError
from laminar.weights.layout import WeightLayout
from laminar.weights.run_memory import SHARED_MEMORY, attach
from laminar.weights.version_file import HiddenFile, VersionReader, VersionWriter

_FILE_NAME = re.compile(r"version-(\d{8})\.weights")


class WeightStore:
    """The versions that one relay (or the trainer beside it) holds in its host's shared memory."""

    def __init__(self, run_id: str, store_name: str, base: Path = SHARED_MEMORY) -> None:
        """Open the store, creating its folder (mode 0700) if it is not there."""
        self.directory = attach(run_id, base) / store_name
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._lock = threading.Lock()  # guards what follows
        self._prepared: HiddenFile | None = None
        # Committed, and still mapped: unmapping takes half as long as writing, so it waits for `prepare`.
        self._written: list[HiddenFile] = []

    def path(self, policy_version: int) -> Path:
        """Where a version lies once it is committed."""
        return self.directory / f"version-{policy_version:08d}.weights"

    def versions(self) -> list[int]:
        """Committed versions, oldest first."""
        matches = (_FILE_NAME.fullmatch(name) for name in os.listdir(self.directory))
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> int | None:
        """The newest committed version, None in an empty store."""
        versions = self.versions()
        return versions[-1] if versions else None

    def begin(self, policy_version: int, layout: WeightLayout) -> VersionWriter:
        """Reserve memory for a version and return its writer. An unfinished writer of the same version is displaced.

        Raises:
            FileExistsError: the version is already committed (versions are never reused).
            UserError: the shared memory is too small.
        """
        if not 0 <= policy_version < 10**8:
            raise ValueError(f"policy version {policy_version} is outside 0..99999999")
        final = self.path(policy_version)
        if final.exists():
            raise FileExistsError(
                errno.EEXIST,
                f"version {policy_version} is already in the store",
                str(final),
            )
        hidden_path = final.with_name(f".{final.name}.partial")
        hidden = self._take_prepared(layout)
        if hidden is None:
            hidden = HiddenFile(hidden_path, layout)
        else:
            hidden.rename(hidden_path)
        return VersionWriter(policy_version, hidden, final, self._written.append)

    def prepare(self, layout: WeightLayout) -> bool:
        """Have memory ready for the next version of this layout, so that writing it takes a memory copy and no more.

        Fresh shared memory comes zeroed page by page, which takes several times as long as the copy itself. Costs the
        memory of one version until the next `begin`; meant to be called off the critical path, from any thread. False
        if there is not enough memory.
        """
        with self._lock:
            self._unmap_written()
            if self._prepared is None or self._prepared.layout != layout:
                self._drop_prepared()
                for left in self.directory.glob(".prepared-*.partial"):  # by a writer that died
                    left.unlink(missing_ok=True)
                try:
                    self._prepared = HiddenFile(self.directory / f".prepared-{os.getpid()}.partial", layout)
                except UserError:
                    return False
                self._prepared.touch()
            return True

    def _take_prepared(self, layout: WeightLayout) -> HiddenFile | None:
        """What `prepare` made, if it fits; else its memory is freed, for it may be needed now."""
        with self._lock:
            self._unmap_written()
            if self._prepared is not None and self._prepared.layout == layout and self._prepared.path.exists():
                prepared, self._prepared = self._prepared, None
                return prepared
            self._drop_prepared()
            return None

    def _unmap_written(self) -> None:
        while self._written:
            self._written.pop().unmap()

    def _drop_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.unmap()
            self._prepared.path.unlink(missing_ok=True)
            self._prepared = None

    def open(self, policy_version: int) -> VersionReader:
        """Map a committed version. Raises FileNotFoundError if it is not (or no longer) there."""
        return VersionReader(self.path(policy_version))

    def retain(self, keep: int) -> list[int]:
        """Unlink all but the newest `keep` versions and return those that went. Readers keep what they have mapped."""
        if keep < 1:
            raise ValueError(f"cannot retain {keep} versions; at least 1")
        gone = self.versions()[:-keep]
        for policy_version in gone:
            self.path(policy_version).unlink(missing_ok=True)
        return gone

    def remove(self) -> None:
        """Unlink every version, finished or not, and the folder. Does nothing if it is already gone."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return
        for name in names:
            (self.directory / name).unlink(missing_ok=True)
        self.directory.rmdir()

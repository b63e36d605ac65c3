"""The versioned weight store: a file per version in shared memory (`version_file.py`).

Invariants: a version is visible only when it is complete, never changes afterwards, and never comes back once it is
gone. Each version is written by one process; several may write different versions into one store (the trainer writes
the next one where its relay still receives another), and any number read.

Imports no torch: relays use it too. `laminar.weights.tensors` gives torch views.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from laminar.errors import UserError
from laminar.weights.layout import WeightLayout
from laminar.weights.run_memory import SHARED_MEMORY, attach
from laminar.weights.version_file import HiddenFile, VersionReader, VersionWriter, remove_if_dead

_PIECE_BYTES = 64 << 20  # prepared at a time: whoever begins a version waits for no more than this

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

    def begin(self, policy_version: int, layout: WeightLayout, *, reserve: bool = True) -> VersionWriter:
        """Begin to write a version.

        Args:
            policy_version: which one.
            layout: what it holds.
            reserve: all of its memory at once; else by `VersionWriter.reserve`, as it is needed.

        Raises:
            FileExistsError: the version is already committed (versions are never reused), or somebody is writing it.
            UserError: the shared memory is too small.
        """
        if not 0 <= policy_version < 10**8:
            raise ValueError(f"policy version {policy_version} is outside 0..99999999")
        final = self.path(policy_version)
        if final.exists():
            raise FileExistsError(errno.EEXIST, f"version {policy_version} is already in the store", str(final))
        hidden_path = final.with_name(f".{final.name}.partial")
        remove_if_dead(hidden_path)
        if hidden_path.exists():
            raise FileExistsError(
                errno.EEXIST, f"version {policy_version} is being written by another writer", str(final)
            )
        hidden = self._take_prepared(layout)
        if hidden is None:
            hidden = HiddenFile(hidden_path, layout)
        else:
            hidden.rename(hidden_path)
        writer = VersionWriter(policy_version, hidden, final, self._written.append)
        if reserve:
            try:
                writer.reserve(layout.total_bytes)
            except UserError:
                writer.discard()
                raise
        return writer

    def prepare(self, layout: WeightLayout) -> bool:
        """Have memory ready for the next version of this layout, so that writing it takes a memory copy and no more.

        Fresh shared memory comes zeroed page by page, which takes several times as long as the copy itself. Costs the
        memory of one version until the next `begin`; meant to be called off the critical path, from any thread: a
        `begin` meanwhile takes the memory as far as it is. False if there is not enough memory.
        """
        with self._lock:
            self._unmap_written()
            if self._prepared is not None and self._prepared.layout == layout:
                return True
            self._drop_prepared()
            for left in self.directory.glob(".prepared-*.partial"):
                remove_if_dead(left)
            try:
                prepared = HiddenFile(self.directory / f".prepared-{os.getpid()}.partial", layout)
            except UserError:
                return False
            self._prepared = prepared
        more = True
        while more:
            with self._lock:
                if self._prepared is not prepared:  # somebody writes into it already
                    break
                try:
                    more = prepared.reserve(_PIECE_BYTES)
                except UserError:
                    self._drop_prepared()
                    return False
                prepared.touch()
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

    @contextlib.contextmanager
    def hold(self, policy_version: int) -> Iterator[str]:
        """A committed version's file, by a path at which all processes of this user find it, whatever retention does meanwhile.

        Raises:
            FileNotFoundError: the version is not (or no longer) there.
        """
        fd = os.open(self.path(policy_version), os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield f"/proc/{os.getpid()}/fd/{fd}"
        finally:
            os.close(fd)

    def retain(self, keep: int, keep_bytes: int | None = None) -> list[int]:
        """Unlink all but the newest versions and return those that went. Readers keep what they have mapped.

        Args:
            keep: how many versions may stay.
            keep_bytes: how many bytes they may have together; None for no bound. The newest stays whatever its size.
        """
        if keep < 1:
            raise ValueError(f"cannot retain {keep} versions; at least 1")
        kept_bytes = kept = 0
        gone: list[int] = []
        for policy_version in reversed(self.versions()):
            path = self.path(policy_version)
            try:
                nbytes = path.stat().st_size
            except FileNotFoundError:  # another process retains, too
                continue
            fits = keep_bytes is None or kept_bytes + nbytes <= keep_bytes
            if kept == 0 or (kept < keep and fits and not gone):
                kept += 1
                kept_bytes += nbytes
            else:
                path.unlink(missing_ok=True)
                gone.append(policy_version)
        return gone[::-1]

    def recover(self) -> list[str]:
        """Take over what an earlier process left: complete versions stay, all else is unlinked; says what went and why.

        What a living process is writing stays, too.
        """
        said = []
        for path in sorted(self.directory.glob(".*.partial")):
            if remove_if_dead(path):
                said.append(f"{path.name}: its writer has ended")
        for policy_version in self.versions():
            try:
                with self.open(policy_version) as reader:
                    found = reader.policy_version
                problem = "" if found == policy_version else f"{self.path(policy_version)}: holds version {found}"
            except FileNotFoundError:
                continue
            except ValueError as error:
                problem = str(error)
            if problem:
                self.path(policy_version).unlink(missing_ok=True)
                said.append(problem)
        return said

    def remove(self) -> None:
        """Unlink every version, finished or not, and the folder. Does nothing if it is already gone."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return
        for name in names:
            (self.directory / name).unlink(missing_ok=True)
        self.directory.rmdir()

"""The folder in a run's shared memory where exported KV waits for its importer.

Invariant: a file here bears the name of the rollout that exported it; it goes when its importer has read it, when the
controller says that nobody needs it, when its exporter is started anew, and with the run's folder.
"""

from __future__ import annotations

from pathlib import Path

from laminar.weights.run_memory import SHARED_MEMORY, attach
from laminar.weights.version_file import remove_if_dead
from laminar.workers.rollout.kv_file import shard_path


class KvFolder:
    """Names and removes the files; engines write and read them."""

    def __init__(self, run_id: str, base: Path = SHARED_MEMORY) -> None:
        """Open the folder, creating it (mode 0700) if it is not there."""
        self.directory = attach(run_id, base) / "kv"
        self.directory.mkdir(mode=0o700, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where the export of this name lies; its shards have the shard's number behind it.

        Raises:
            ValueError: the name is no plain file name.
        """
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} is no name of exported KV")
        return self.directory / name

    def holds(self, name: str) -> bool:
        """Whether it is here, as far as the name of its first shard tells."""
        return shard_path(self.path(name), 0).exists()

    def remove(self, name: str) -> None:
        """Remove an export with all its shards. Does nothing if it is not there (any more)."""
        path = self.path(name)
        for shard in self.directory.iterdir():
            if shard.name.rpartition(".")[0] == path.name:
                shard.unlink(missing_ok=True)

    def remove_all_of(self, exporter: str) -> int:
        """Remove what a rollout has exported, and what dead writers left unfinished; returns how many files went."""
        gone = 0
        for path in self.directory.iterdir():
            if path.name.startswith("."):
                gone += remove_if_dead(path)
            elif path.name.startswith(f"{exporter}~"):
                path.unlink(missing_ok=True)
                gone += 1
        return gone


def export_name(exporter: str, trajectory_id: str, lease: int) -> str:
    """Name of an export: unique in the run, for a lease is never given twice."""
    return f"{exporter}~{trajectory_id}~{lease}"

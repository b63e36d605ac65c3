"""Exported KV in the modelled hosts' shared memory.

Invariant: an export outlives the process that made it; it goes when it was imported, when it is dropped, or when a process of
its exporter's name starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from laminar.protocol.messages import KvReference, KvTaken, TrajectoryAssignment


class KvShelf:
    """All exports of a run."""

    def __init__(self, bytes_per_token: int) -> None:
        """`bytes_per_token`: of KV, all layers."""
        self._bytes_per_token = bytes_per_token
        self._references: dict[str, KvReference] = {}  # by name of the export

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self._references)

    def put(self, exporter: str, trajectory_id: str, lease: int, policy_version: int, tokens: int) -> KvReference:
        """A rollout exports the KV of a trajectory that it had under this lease."""
        name = f"{exporter}~{trajectory_id}~{lease}"
        reference = self._references[name] = KvReference(
            trajectory_id=trajectory_id,
            lease=lease,
            exporter=exporter,
            name=name,
            policy_version=policy_version,
            tokens=tokens,
            nbytes=tokens * self._bytes_per_token,
            shards=1,
            address="",
            epoch=0,
        )
        return reference

    def take(self, assignment: TrajectoryAssignment) -> KvTaken:
        """Import what came with an assignment, if it is there, and remove it."""
        assert assignment.kv is not None
        taken = self._references.pop(assignment.kv.name, None)
        return KvTaken(
            trajectory_id=assignment.trajectory_id,
            lease=assignment.lease,
            name=assignment.kv.name,
            tokens=taken.tokens if taken else 0,
            nbytes=taken.nbytes if taken else 0,
            seconds=0.0,
            error="" if taken else "it is not there any more",
        )

    def remove(self, name: str) -> None:
        """Nobody needs it."""
        self._references.pop(name, None)

    def clear(self, exporter: str) -> None:
        """Remove all that this rollout has exported."""
        for name in [name for name, reference in self._references.items() if reference.exporter == exporter]:
            del self._references[name]

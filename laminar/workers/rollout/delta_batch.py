"""Deltas of many streams, collected until they are sent as one message."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from laminar.protocol.messages import KvReference, RolloutLoad, TrajectoryDeltas
from laminar.workers.rollout.engine import EngineDelta


@dataclass(kw_only=True, slots=True)
class _Pending:
    lease: int
    start: int
    token_ids: list[NDArray[np.int32]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    finish_reason: str | None = None
    exported_kv: KvReference | None = None


class DeltaBatch:
    """What the trajectories of one policy version gained since the last `take`."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}
        self._policy_version: int | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def add(
        self, trajectory_id: str, lease: int, start: int, delta: EngineDelta, exported_kv: KvReference | None = None
    ) -> None:
        """Add a delta; `start` is the number of response tokens before it, `exported_kv` what its abort has left.

        Raises:
            RuntimeError: it is of another version than what is collected (weights changed under open streams).
        """
        if self._policy_version is None:
            self._policy_version = delta.policy_version
        elif self._policy_version != delta.policy_version:
            raise RuntimeError(
                f"trajectory {trajectory_id}: the engine served version {delta.policy_version} while deltas of version "
                f"{self._policy_version} were open"
            )
        pending = self._pending.setdefault(trajectory_id, _Pending(lease=lease, start=start))
        pending.token_ids.append(delta.token_ids)
        pending.logprobs.append(delta.logprobs)
        pending.finish_reason = delta.finish_reason
        pending.exported_kv = exported_kv

    def take(self, load: RolloutLoad) -> TrajectoryDeltas | None:
        """All that was collected as one message, or None; the batch is empty afterwards."""
        if not self._pending or self._policy_version is None:
            return None
        entries = list(self._pending.items())
        counts = [sum(len(piece) for piece in entry.token_ids) for _, entry in entries]
        message = TrajectoryDeltas(
            policy_version=self._policy_version,
            trajectory_ids=tuple(trajectory_id for trajectory_id, _ in entries),
            leases=tuple(entry.lease for _, entry in entries),
            starts=np.array([entry.start for _, entry in entries], np.int32),
            token_counts=np.array(counts, np.int32),
            token_ids=np.concatenate([piece for _, entry in entries for piece in entry.token_ids]),
            logprobs=np.concatenate([piece for _, entry in entries for piece in entry.logprobs]),
            finish_reasons=tuple(entry.finish_reason for _, entry in entries),
            load=load,
            exported_kv=tuple(entry.exported_kv for _, entry in entries if entry.exported_kv is not None),
        )
        self._pending, self._policy_version = {}, None
        return message

"""What a rollout keeps for the case that its controller dies: the tokens of all that it generates, and of what ended of late.

Invariant: whatever the controller may not have written down by the time of its death can be sent again. It is bounded: by
`rollout.max_running` trajectories in progress, and those that ended within KEEP_S or without a controller, which gives none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from laminar.protocol.messages import RolloutJoined, RolloutLoad, TrajectoryAssignment, TrajectoryDeltas
from laminar.workers.rollout.engine import EngineDelta

KEEP_S = 30.0  # far longer than a controller takes to write down what it has heard


@dataclass(kw_only=True, slots=True)
class _Held:
    lease: int
    policy_version: int
    start: int  # response tokens that it was leased with
    token_ids: list[NDArray[np.int32]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    finish_reason: str | None = None
    ended_at: float = 0.0  # time.monotonic()


class HeldTokens:
    """By trajectory; those that ended first come first."""

    def __init__(self) -> None:
        self._open: dict[str, _Held] = {}
        self._ended: dict[str, _Held] = {}

    def begin(self, assignment: TrajectoryAssignment) -> None:
        """It is leased to this rollout."""
        self._ended.pop(assignment.trajectory_id, None)
        self._open[assignment.trajectory_id] = _Held(
            lease=assignment.lease, policy_version=assignment.policy_version, start=len(assignment.token_ids)
        )

    def add(self, assignment: TrajectoryAssignment, delta: EngineDelta) -> None:
        """It has gained tokens, and may have ended."""
        held = self._open.get(assignment.trajectory_id)
        if held is None or held.lease != assignment.lease:
            return
        held.token_ids.append(delta.token_ids)
        held.logprobs.append(delta.logprobs)
        if delta.finish_reason is not None:
            held.finish_reason, held.ended_at = delta.finish_reason, time.monotonic()
            self._ended[assignment.trajectory_id] = self._open.pop(assignment.trajectory_id)

    def forget_old(self) -> None:
        """A controller lives, and has had its time to write them down."""
        now = time.monotonic()
        while self._ended and now - self._ended[first := next(iter(self._ended))].ended_at > KEEP_S:
            del self._ended[first]

    def joined(self, policy_version: int) -> RolloutJoined:
        """What is here, for a controller that does not know."""
        held = {**self._ended, **self._open}
        return RolloutJoined(
            policy_version=policy_version,
            trajectory_ids=tuple(held),
            leases=tuple(entry.lease for entry in held.values()),
        )

    def deltas(self, load: RolloutLoad) -> Iterator[TrajectoryDeltas]:
        """All their tokens, those of one version in one message."""
        held = {**self._ended, **self._open}
        for version in dict.fromkeys(entry.policy_version for entry in held.values()):
            entries = [(name, entry) for name, entry in held.items() if entry.policy_version == version]
            token_ids = [piece for _, entry in entries for piece in entry.token_ids]
            logprobs = [piece for _, entry in entries for piece in entry.logprobs]
            yield TrajectoryDeltas(
                policy_version=version,
                trajectory_ids=tuple(name for name, _ in entries),
                leases=tuple(entry.lease for _, entry in entries),
                starts=np.array([entry.start for _, entry in entries], np.int32),
                token_counts=np.array([sum(map(len, entry.token_ids)) for _, entry in entries], np.int32),
                token_ids=np.concatenate([np.empty(0, np.int32), *token_ids]),
                logprobs=np.concatenate([np.empty(0, np.float32), *logprobs]),
                finish_reasons=tuple(entry.finish_reason for _, entry in entries),
                load=load,
            )

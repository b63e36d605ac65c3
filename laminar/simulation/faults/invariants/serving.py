"""A rollout is given work only for the version that it has loaded, and none before it has loaded one.

From the messages alone: what the rollout got, and what it said that it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.protocol.messages import Generate, PullFailed, PullWeights, RolloutJoined, TrajectoryDeltas, WeightsPulled
from laminar.simulation.faults.invariants.invariant import Invariant, Observed


class ServesWhatItLoaded(Invariant):
    """See the module's text."""

    name = "a rollout serves only what it has loaded"

    def __init__(self, run: Observed) -> None:
        super().__init__(run)
        self._served: dict[str, int] = {}  # by peer: a process, not a replica
        self._newest: dict[str, int] = {}  # that it has ever served
        self._pulling: dict[str, PullWeights] = {}

    def message_handlers(self) -> dict[type, Callable[[str, bool, Any], None]]:
        """See `Invariant`."""
        return {
            RolloutJoined: self._on_joined,
            PullWeights: self._on_pull,
            WeightsPulled: self._on_pulled,
            PullFailed: self._on_failed,
            Generate: self._on_generate,
            TrajectoryDeltas: self._on_deltas,
        }

    def _on_joined(self, peer: str, to_worker: bool, message: RolloutJoined) -> None:
        """To a new controller; the answer to the last pull may have been for the one before."""
        asked = self._pulling.pop(peer, None)
        version = message.policy_version
        if asked is not None and version != self._served.get(peer):
            self._pulling[peer] = asked
            self._on_pulled(peer, to_worker, WeightsPulled(policy_version=version, seconds=0.0, nbytes=0))
        elif version != self._served.get(peer, -1):
            self.fail(f"{peer} says that it serves version {version}; it has loaded {self._served.get(peer)}")

    def _on_pull(self, peer: str, to_worker: bool, message: PullWeights) -> None:
        self._pulling[peer] = message

    def _on_pulled(self, peer: str, to_worker: bool, message: WeightsPulled) -> None:
        version, asked = message.policy_version, self._pulling.get(peer)
        answers = asked is not None and (
            version == asked.policy_version if asked.exact else version >= asked.policy_version
        )
        if answers:
            del self._pulling[peer]
            self._served[peer] = version
            self._newest[peer] = max(version, self._newest.get(peer, -1))
        elif version > self._newest.get(peer, -1):  # else it is said again, maybe late
            self.fail(f"{peer} says that it serves version {version}; it was told to pull {asked}")

    def _on_failed(self, peer: str, to_worker: bool, message: PullFailed) -> None:
        self._pulling.pop(peer, None)

    def _on_generate(self, peer: str, to_worker: bool, message: Generate) -> None:
        served = self._served.get(peer)
        for assignment in message.assignments:
            if served is None:
                self.fail(f"{peer} is given trajectory {assignment.trajectory_id}, and has no weights yet")
            if peer in self._pulling:
                self.fail(f"{peer} is given trajectory {assignment.trajectory_id} while it pulls")
            if assignment.policy_version != served:
                self.fail(
                    f"{peer} is given trajectory {assignment.trajectory_id} for version {assignment.policy_version}, and serves "
                    f"{served}"
                )

    def _on_deltas(self, peer: str, to_worker: bool, message: TrajectoryDeltas) -> None:
        if message.policy_version > self._newest.get(peer, -1) and message.token_ids.size:
            self.fail(f"{peer} generated with version {message.policy_version}; its newest is {self._newest.get(peer)}")

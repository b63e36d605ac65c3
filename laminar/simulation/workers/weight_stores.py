"""The modelled weights: the seconds that they take, and the stores that hold them in the hosts' shared memory.

Invariant: a store outlives the processes that use it; only the loss of its host takes it away.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightTimes:
    """Seconds of moving weights from the master relay to the rollouts."""

    nbytes: int  # of a version
    latency_s: float  # of the chain, per chunk and hop
    bandwidth: float  # of the chain, bytes/s; infinite where the GPUs get their weights without relays
    pull_s: float  # from a relay's memory into the GPUs of one rollout

    def chunks(self, chunk_bytes: int) -> int:
        """Of a version."""
        return -(-self.nbytes // chunk_bytes)

    def chunk_s(self, chunk_bytes: int) -> float:
        """From one relay to the next, of one chunk (the paper, appendix D: alpha + beta m / k)."""
        return self.latency_s + self.nbytes / self.bandwidth / self.chunks(chunk_bytes)


class WeightStores:
    """All stores of a run, by name."""

    def __init__(self) -> None:
        self._versions: dict[str, list[int]] = {}  # ascending

    def put(self, name: str, version: int, keep: int) -> None:
        """Commit a version; the oldest beyond `keep` go."""
        self._versions[name] = sorted({*self.held(name), version})[-keep:]

    def held(self, name: str) -> list[int]:
        """Versions in a store, ascending; none if there is no such store."""
        return self._versions.get(name, [])

    def lose(self, name: str) -> None:
        """Its host is gone."""
        self._versions.pop(name, None)

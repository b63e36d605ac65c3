"""Where an engine's time went. Invariant: the five kinds of seconds add up to the time since the start."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class EngineStatistics:
    """Sums since the start of one replica."""

    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    environment_seconds: float = 0.0  # nothing to decode, but trajectories in tool calls
    idle_seconds: float = 0.0  # nothing at all
    stopped_seconds: float = 0.0  # weights being loaded
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    imported_tokens: int = 0  # whose KV came with a move
    preemptions: int = 0
    preempted_tokens: int = 0  # KV thrown away by preemptions, to be computed again
    kv_token_seconds: float = 0.0  # tokens in the KV cache, integrated over time

    def copy(self) -> EngineStatistics:
        """An independent copy."""
        return dataclasses.replace(self)

    def mean_kv_utilization(self, kv_capacity: int) -> float:
        """Share of the KV cache in use, on average over time (0 before any time has passed)."""
        seconds = (
            self.decode_seconds
            + self.prefill_seconds
            + self.environment_seconds
            + self.idle_seconds
            + self.stopped_seconds
        )
        return self.kv_token_seconds / (kv_capacity * seconds) if seconds else 0.0

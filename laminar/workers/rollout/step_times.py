"""How long an engine's decode steps take by batch size, between two polls: what the controller fits the batch bound from.

Invariant: a step that was no pure decode step (something joined and was prefilled, weights were loaded) is not counted, and
memory does not grow with the number of steps.
"""

from __future__ import annotations

import threading

import numpy as np

from laminar.protocol.messages import DecodeSteps

KEPT = 64  # newest steps of each batch size


class StepTimes:
    """Filled by an engine, in whatever thread it decodes; taken by the rollout worker."""

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[float, float]]] = {}  # batch size -> (seconds, KV utilization)
        self._counts: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, running: int, seconds: float, kv_utilization: float) -> None:
        """One decode step of `running` trajectories."""
        with self._lock:
            steps = self._steps.setdefault(running, [])
            count = self._counts.get(running, 0)
            self._counts[running] = count + 1
            if len(steps) < KEPT:
                steps.append((seconds, kv_utilization))
            else:
                steps[count % KEPT] = (seconds, kv_utilization)

    def take(self) -> DecodeSteps:
        """What was added since the last call."""
        with self._lock:
            steps, self._steps, self._counts = self._steps, {}, {}
        sizes = sorted(steps)
        return DecodeSteps(
            running=np.array(sizes, np.int32),
            seconds=np.array([np.median([seconds for seconds, _ in steps[size]]) for size in sizes], np.float32),
            kv_utilization=np.array([np.mean([kv for _, kv in steps[size]]) for size in sizes], np.float32),
        )

"""How far a run is before its first step: which workers are there, and who serves the first weights.

Pure bookkeeping from events; the words are for a person who wonders what a start is waiting for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.observability.events import (
    WeightsPublished,
    WeightsPulled,
    WorkerJoined,
    WorkerProgress,
    WorkerReady,
)

SHOWN_WORKERS = 3  # named at once in "waiting for"


@dataclass(kw_only=True, slots=True)
class WarmUp:
    """The workers that the config calls for, and what is known of them."""

    missing: dict[str, str]  # name -> what it said last; "" before it connected
    expected: int
    where: dict[str, str] = field(default_factory=dict)  # name -> host and process
    rollouts: int
    serving: set[str] = field(default_factory=set)  # rollouts with weights
    published: bool = False

    @classmethod
    def of(cls, config: ExperimentConfig) -> WarmUp:
        """Nothing has been started."""
        counts = {
            "trainer": config.trainer.ranks,
            "relay": config.relay.count,
            "rollout": config.rollout.replicas,
            "environment": config.reward.workers,
        }
        names = [f"{kind}-{index}" for kind, count in counts.items() for index in range(count)]
        return cls(missing=dict.fromkeys(names, ""), expected=len(names), rollouts=config.rollout.replicas)

    @property
    def done(self) -> bool:
        """Every rollout has weights."""
        return len(self.serving) >= self.rollouts

    @property
    def ready(self) -> int:
        """Workers that are ready."""
        return self.expected - len(self.missing)

    def take_in(self, event: Any) -> None:
        """Note what an event says about it."""
        if isinstance(event, WorkerJoined):
            self.where[event.worker] = f"{event.host}, process {event.pid}"
            if event.worker in self.missing:
                self.missing[event.worker] = "connected"
        elif isinstance(event, WorkerProgress):
            if event.worker in self.missing:
                self.missing[event.worker] = event.text
        elif isinstance(event, WorkerReady):
            self.missing.pop(event.worker, None)
        elif isinstance(event, WeightsPublished):
            self.published = True
        elif isinstance(event, WeightsPulled):
            self.serving.add(event.rollout)

    def waits_for(self) -> str:
        """What the next thing to happen is."""
        if self.missing:
            named = [f"{name} ({said or 'not connected'})" for name, said in list(self.missing.items())[:SHOWN_WORKERS]]
            more = len(self.missing) - len(named)
            rest = f" and {more} more" if more else ""
            return f"{self.ready} of {self.expected} workers ready, waiting for {', '.join(named)}{rest}"
        if not self.published:
            return "all workers are ready, waiting for the trainer to publish the initial weights"
        if not self.done:
            return f"waiting for the rollouts to pull the initial weights, {len(self.serving)} of {self.rollouts} have"
        return "all rollouts generate, waiting for the first batch"

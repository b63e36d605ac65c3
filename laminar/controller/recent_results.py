"""What the REPL shows and nobody else keeps: the newest metrics line and the text of recent responses."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from laminar.observability.events import EventBus, MetricsReported, TrajectoryScored

KEPT_CHARACTERS = 2_000_000  # of all response texts together


class RecentResults:
    """Subscribes to the bus; bounded by the length of what it keeps."""

    def __init__(self, events: EventBus) -> None:
        self.metrics: dict[str, Any] = {}  # the newest line of metrics.jsonl
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._characters = 0
        events.subscribe(self._on_metrics, MetricsReported)
        events.subscribe(self._on_scored, TrajectoryScored)

    def response_text(self, trajectory_id: str) -> str | None:
        """The text that was scored; None if there is none yet or it was forgotten."""
        return self._texts.get(trajectory_id)

    def _on_metrics(self, event: MetricsReported) -> None:
        self.metrics = event.line

    def _on_scored(self, event: TrajectoryScored) -> None:
        self._characters -= len(self._texts.pop(event.trajectory.trajectory_id, ""))
        self._texts[event.trajectory.trajectory_id] = event.response_text
        self._characters += len(event.response_text)
        while self._characters > KEPT_CHARACTERS:
            _, forgotten = self._texts.popitem(last=False)
            self._characters -= len(forgotten)

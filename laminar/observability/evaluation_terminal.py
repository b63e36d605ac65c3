"""What `laminar eval` shows: what it starts and waits for, how far it is, and a table at the end.

Where there is no terminal the same comes as lines, without control characters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from laminar.evaluation_result import EvaluationResult
from laminar.observability import events as kinds
from laminar.observability.evaluation_text import evaluation_rows
from laminar.observability.events import EventBus
from laminar.observability.plain_text import duration, printable

REFRESH_S = 0.5
PLAIN_WAIT_S = 15.0  # between two lines that say how far it is


class EvaluationTerminal:
    """Subscribes to the bus and prints."""

    def __init__(self, events: EventBus, console: Console, *, now: Callable[[], float]) -> None:
        """`now`: in seconds."""
        self.result: EvaluationResult | None = None
        self._console = console
        self._now = now
        self._started = self._said = now()
        self._scored = self._total = 0
        events.subscribe(self._on_ready, kinds.WorkerReady)
        events.subscribe(self._on_started, kinds.EvaluationStarted)
        events.subscribe(self._on_scored, kinds.TrajectoryScored)
        events.subscribe(self._on_finished, kinds.EvaluationFinished)
        events.subscribe(self._on_notice, kinds.Notice)

    async def refresh_forever(self) -> None:
        """Say now and then how far it is; ends only by cancellation."""
        while True:
            await asyncio.sleep(REFRESH_S)
            if self._now() - self._said >= PLAIN_WAIT_S and self._total:
                self.say(f"{duration(self._now() - self._started)}: {self._scored} of {self._total} responses scored")

    def say(self, text: str, style: str = "") -> None:
        """A line."""
        self._said = self._now()
        self._console.print(Text(printable(text), style=style), soft_wrap=True)

    def table(self, title: str, responses: Path) -> None:
        """The figures, and where the responses are."""
        assert self.result is not None
        table = Table(title=title, show_header=False, title_justify="left")
        for name, value in evaluation_rows(self.result):
            table.add_row(Text(name, style="cyan"), value)
        self._console.print(table)
        self.say(f"responses: {responses}")

    def _on_ready(self, event: kinds.WorkerReady) -> None:
        self.say(f"{event.worker} is ready after {duration(self._now() - self._started)}: {event.detail}")

    def _on_started(self, event: kinds.EvaluationStarted) -> None:
        self._scored, self._total = 0, event.trajectories

    def _on_scored(self, event: kinds.TrajectoryScored) -> None:
        self._scored += 1

    def _on_finished(self, event: kinds.EvaluationFinished) -> None:
        self.result = event.result

    def _on_notice(self, event: kinds.Notice) -> None:
        if event.level == "warning":
            self.say(f"warning: {event.text}", "bold yellow")

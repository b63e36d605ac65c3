"""What `laminar train` shows: what was started and where, a line per step under a live bar, a summary at the end.

Where standard output is not a terminal the same text comes as plain lines, flushed, without control characters.
Invariant: a terminal that is gone (closed window, broken pipe) silences this part and leaves the run alone.
"""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import laminar
from laminar.config.command import summary
from laminar.config.schema import ExperimentConfig
from laminar.observability import events as kinds
from laminar.observability.evaluation_text import evaluation_line
from laminar.observability.events import EventBus
from laminar.observability.plain_text import bars, data_size, duration, printable
from laminar.observability.run_summary import RunSummary
from laminar.observability.step_table import StepTable
from laminar.observability.warm_up import WarmUp

HEADER_EVERY = 20  # steps between two header lines
REFRESH_S = 0.25  # the bar is redrawn no more often than this
PLAIN_WAIT_S = 15.0  # between two lines that say what a start waits for, where there is no bar
SHOWN_REJECTIONS = 3
ESTIMATE_STEPS = 10  # the time left is estimated from so many recent steps
PLOT_WIDTH, PLOT_HEIGHT = 60, 5


class _Console(Console):
    """A console that reports a broken pipe instead of ending the process."""

    def on_broken_pipe(self) -> None:
        raise OSError(errno.EPIPE, "the reader has gone")


def default_console() -> Console:
    """Standard output; a live bar only on a real terminal, whatever FORCE_COLOR says."""
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return _Console(highlight=False, force_interactive=None if sys.stdout.isatty() else False)


class Terminal:
    """Subscribes to the bus and prints. `open` before the run, `finish` or `close` after it."""

    def __init__(
        self,
        events: EventBus,
        config: ExperimentConfig,
        *,
        run_dir: Path,
        now: Callable[[], float],
        console: Console | None = None,
    ) -> None:
        """`now` is the controller's clock, in seconds."""
        self._events = events
        self._config = config
        self._run_dir = run_dir
        self._now = now
        self._console = console or default_console()
        self._totals = RunSummary(events, now)
        self._warm_up = WarmUp.of(config)
        self._table = StepTable(config.trainer.steps, self._console.width if self._console.is_terminal else None)
        self._started = self._refreshed = self._said_waiting = now()
        self._more_rows: list[tuple[str, str]] = []  # of the summary
        self._live: Live | None = None
        self._step = 0
        self._rows = 0
        self._groups = 0  # complete and not yet given to the trainer
        self._training = False
        events.subscribe(self._on_start, kinds.ProcessStarted)
        events.subscribe(self._on_worker, kinds.WorkerJoined, kinds.WorkerProgress, kinds.WorkerReady)
        events.subscribe(self._on_weights, kinds.WeightsPublished, kinds.WeightsPulled)
        events.subscribe(self._on_rejected, kinds.PromptRejected)
        events.subscribe(self._on_batch, kinds.GroupCompleted, kinds.StepStarted, kinds.StepFinished)
        events.subscribe(self._on_metrics, kinds.MetricsReported)
        events.subscribe(self._on_checkpoint, kinds.CheckpointFinished)
        events.subscribe(self._on_evaluation, kinds.EvaluationFinished, kinds.EvaluationStartedOver)
        events.subscribe(self._on_notice, kinds.Notice)
        events.subscribe(lambda _: self.refresh(), kinds.TokensAppended)

    def open(self) -> None:
        """Say what runs and where, and put up the bar."""
        self._print(f"laminar {laminar.__version__}: {summary(self._config)}", style="bold")
        self._print(f"run directory  {self._run_dir}")
        self._print(f"look inside    laminar attach {self._run_dir}")
        self._print("Ctrl-C once ends the run after the current step with a checkpoint, twice at once")
        if self._console.is_interactive:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                get_renderable=self._bar,
                redirect_stderr=False,
            )
            self._guard(self._live.start)

    def close(self) -> None:
        """Take the bar down; the terminal is as it was. May be called again."""
        live, self._live = self._live, None
        if live is not None:
            self._guard(live.stop)

    def add_row(self, name: str, value: str) -> None:
        """One more row of the summary."""
        self._more_rows.append((name, value))

    def finish(self, outcome: str) -> None:
        """Close, and print the summary under `outcome`, one line such as "finished: 40 steps"."""
        self.close()
        rows = [*self._totals.rows(), *self._more_rows]
        self._print("")
        self._print(outcome, style="bold")
        if self._console.is_terminal:
            grid = Table.grid(padding=(0, 2))
            for name, value in rows:
                grid.add_row(Text(name, style="cyan"), Text(printable(value), overflow="fold"))
            self._guard(lambda: self._console.print(grid))
        else:
            for name, value in rows:
                self._print(f"{name:<16}  {value}")
        self._plot()

    async def refresh_forever(self) -> None:
        """Keep elapsed times moving while no event comes; ends only by cancellation."""
        while True:
            await asyncio.sleep(REFRESH_S)
            self.refresh()

    def refresh(self) -> None:
        """Redraw the bar if it is time; without a bar, say now and then what a start waits for."""
        now = self._now()
        if self._live is not None:
            if now - self._refreshed >= REFRESH_S:
                self._refreshed = now
                self._guard(self._live.refresh)
        elif not self._step and not self._training and now - self._said_waiting >= PLAIN_WAIT_S:
            self._said_waiting = now
            self._print(f"{duration(now - self._started)}: {self._status()}")

    # ------------------------------------------------------------------ events

    def _on_start(self, event: kinds.ProcessStarted) -> None:
        self._print(f"started {event.name}, process {event.pid}: {event.command}", crop=True)

    def _on_worker(self, event: kinds.WorkerJoined | kinds.WorkerProgress | kinds.WorkerReady) -> None:
        self._warm_up.take_in(event)
        if isinstance(event, kinds.WorkerReady):
            where = self._warm_up.where.get(event.worker, "")
            detail = f": {event.detail}" if event.detail else ""
            self._print(f"{event.worker} is ready ({where}){detail}", crop=True)
            if not self._warm_up.missing and not self._warm_up.published:
                self._print(f"all {self._warm_up.expected} workers are ready after {self._elapsed()}")
        elif isinstance(event, kinds.WorkerProgress) and self._live is None:
            self._print(f"{event.worker}: {event.text}")
        self.refresh()

    def _on_weights(self, event: kinds.WeightsPublished | kinds.WeightsPulled) -> None:
        before = (self._warm_up.published, self._warm_up.done)
        self._warm_up.take_in(event)
        after = (self._warm_up.published, self._warm_up.done)
        if isinstance(event, kinds.WeightsPublished) and before[0] != after[0]:
            size = data_size(event.nbytes)
            self._print(f"initial weights published, {size} in {duration(event.publish_stall_s)}")
        if before[1] != after[1]:
            self._print(f"all rollouts serve them and generate after {self._elapsed()}")
        self.refresh()

    def _on_rejected(self, event: kinds.PromptRejected) -> None:
        count = self._totals.rejected_prompts
        if count <= SHOWN_REJECTIONS:
            self._warn(f"prompt {event.prompt_id} of {event.source} is left out: {event.reason}")
        if count == SHOWN_REJECTIONS:
            self._warn("further prompts that are left out are counted, and named in events.jsonl")

    def _on_batch(self, event: kinds.GroupCompleted | kinds.StepStarted | kinds.StepFinished) -> None:
        if isinstance(event, kinds.GroupCompleted):
            self._groups += 1
        elif isinstance(event, kinds.StepStarted):
            self._groups -= event.groups
            self._training = True
        else:
            self._step, self._training = event.step, False
        self.refresh()

    def _on_metrics(self, event: kinds.MetricsReported) -> None:
        if self._rows % HEADER_EVERY == 0:
            self._print(self._table.header(), style="bold")
        self._rows += 1
        self._print(self._table.row(event.line))

    def _on_checkpoint(self, event: kinds.CheckpointFinished) -> None:
        if not event.error:
            size = f"{data_size(event.nbytes)} in {duration(event.seconds)}"
            self._print(f"checkpoint of step {event.step}: {event.path} ({size})")

    def _on_evaluation(self, event: kinds.EvaluationFinished | kinds.EvaluationStartedOver) -> None:
        if isinstance(event, kinds.EvaluationStartedOver):
            text = f"no rollout has version {event.policy_version} any more; evaluation {event.evaluation} starts over"
            self._warn(text)
        else:
            self._print(evaluation_line(event.result))

    def _on_notice(self, event: kinds.Notice) -> None:
        if event.level == "warning":
            self._warn(event.text)
        else:
            self._print(event.text)

    # ------------------------------------------------------------------ drawing

    def _bar(self) -> RenderableType:
        """The live part: how far, how long still, and what is being waited for."""
        steps = self._config.trainer.steps
        grid = Table.grid(padding=(0, 1))
        if self._step or self._warm_up.done:
            bar = ProgressBar(total=steps, completed=self._step, width=30)
            grid.add_row(Text(f"step {self._step}/{steps}"), bar, Text(f"{self._elapsed()}{self._time_left()}"))
        else:
            bar = ProgressBar(total=self._warm_up.expected, completed=self._warm_up.ready, width=30)
            grid.add_row(Text("starting"), bar, Text(self._elapsed()))
        return Group(grid, Text(printable(self._status()), style="dim", no_wrap=True, overflow="ellipsis"))

    def _status(self) -> str:
        if not self._warm_up.done:
            return self._warm_up.waits_for()
        if self._training:
            return f"step {self._step + 1}: training, {self._groups} groups in the buffer"
        if self._step >= self._config.trainer.steps:
            return "writing the final checkpoint"
        needed = self._config.trainer.groups_per_step
        return f"step {self._step + 1}: waiting for trajectories, {self._groups} of {needed} groups in the buffer"

    def _time_left(self) -> str:
        recent = self._totals.step_seconds[-ESTIMATE_STEPS:]
        left = self._config.trainer.steps - self._step
        if not recent or left <= 0:
            return ""
        return f", about {duration(left * sum(recent) / len(recent))} left"

    def _plot(self) -> None:
        """The reward of all steps as bars, where the terminal's encoding has them."""
        rewards = self._totals.rewards
        if len(rewards) < 2 or self._console.options.ascii_only:
            return
        width = max(1, min(PLOT_WIDTH, self._console.width - 12))
        self._print("")
        lines = bars(rewards, width=width, height=PLOT_HEIGHT)
        for number, line in enumerate(lines):
            edge = {0: f"{max(rewards):.3f}", len(lines) - 1: f"{min(rewards):.3f}"}.get(number, "")
            self._print(f"{edge:>9} {line}")
        self._print(f"{'':>9} reward, steps 1 to {self._step}")

    def _elapsed(self) -> str:
        return duration(self._now() - self._started)

    def _warn(self, text: str) -> None:
        self._print(f"warning: {text}", style="bold yellow")

    def _print(self, text: str, *, style: str = "", crop: bool = False) -> None:
        """One line (or more); on a terminal `crop` cuts it at the right edge."""
        shown = Text(printable(text), style=style)
        if self._console.is_terminal:
            overflow: Any = "ellipsis" if crop else "fold"
            self._guard(lambda: self._console.print(shown, no_wrap=crop, overflow=overflow))
        else:
            self._guard(lambda: self._console.print(shown, soft_wrap=True))

    def _guard(self, output: Callable[[], None]) -> None:
        """Write to the terminal; if that fails, be silent from now on."""
        try:
            output()
        except (OSError, ValueError) as error:  # ValueError: the file object is closed
            if self._console.quiet:
                return
            self._console.quiet = True
            self._live = None
            text = f"the terminal cannot be written ({error}); the run goes on, see {self._run_dir}"
            self._events.emit(kinds.Notice(level="warning", text=text))

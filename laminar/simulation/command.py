"""`laminar simulate CONFIG`: runs a study, prints its table, and writes its page.

Invariant: what cannot be run or written is refused before anything runs. With `--json -` the document alone is on
standard output, everything for a person on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from laminar.errors import RunFailed, UserError
from laminar.observability.output_file import prepare, write
from laminar.observability.plain_text import duration
from laminar.simulation.clock.virtual_time_errors import VirtualTimeError
from laminar.simulation.report.report_json import to_json
from laminar.simulation.report.report_page import page
from laminar.simulation.report.report_table import print_report
from laminar.simulation.study.config import load_study
from laminar.simulation.study.explanations import EXPLANATIONS
from laminar.simulation.study.plan import PlannedCase, plan_cases
from laminar.simulation.study.run_study import Progress as CaseProgress
from laminar.simulation.study.run_study import run_study

PAGES = Path("runs") / "simulations"
SHOWN_CASES = 8  # running ones, in the progress display


def simulate(
    config_file: Path,
    overrides: Sequence[str] = (),
    *,
    json_file: str | None = None,
    html_file: Path | None = None,
    processes: int | None = None,
) -> int:
    """Run the study in this file. Returns the exit status.

    Args:
        json_file: where the result goes as JSON as well; "-" is standard output.
        html_file: the page, `runs/simulations/<name>.html` if not given.
        processes: how many cases run at the same time; all cores if not given.

    Raises:
        UserError: the config, a case or an output cannot be; nothing has run then.
        RunFailed: a case failed.
    """
    if processes is not None and processes < 1:
        raise UserError(f"--processes: {processes}; expected 1 or more")
    config = load_study(config_file, overrides)
    cases = plan_cases(config)
    html_file = PAGES / f"{config.name}.html" if html_file is None else html_file
    prepare("--html", html_file)
    if json_file not in (None, "-"):
        prepare("--json", Path(json_file or ""))
    person = Console(stderr=json_file == "-", highlight=False)
    try:
        with _progress(person, cases, config.steps) as show:
            result = run_study(config, cases, processes=processes or os.cpu_count() or 1, show=show)
    except VirtualTimeError as error:
        raise RunFailed(str(error)) from error
    print_report(result, person, EXPLANATIONS)
    write(html_file, page(result, EXPLANATIONS))
    person.print(f"Page: {html_file}", soft_wrap=True)
    if json_file == "-":
        sys.stdout.write(to_json(result, EXPLANATIONS))
    elif json_file is not None:
        write(Path(json_file), to_json(result, EXPLANATIONS))
        person.print(f"JSON: {json_file}", soft_wrap=True)
    return 0


@contextmanager
def _progress(console: Console, cases: Sequence[PlannedCase], steps: int) -> Iterator[Callable[[CaseProgress], None]]:
    """A bar over all cases, and a line per running one, with its step and its clock; in a log, a line per case that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[clock]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        # Steps of all cases are counted, weighted by nothing: cases of one study cost about the same per trajectory.
        total = bars.add_task(f"steps of {len(cases)} cases", total=steps * len(cases), clock="")
        running: dict[int, TaskID] = {}  # case -> its bar
        done: set[int] = set()

        def show(progress: CaseProgress) -> None:
            bars.advance(total)
            if progress.case not in running:
                shown = len(running) - len(done) < SHOWN_CASES
                running[progress.case] = bars.add_task(
                    f"  {cases[progress.case]}", total=steps, clock="", visible=shown
                )
            bar = running[progress.case]
            bars.update(bar, completed=progress.step, clock=f"cluster time {duration(progress.time_s)}")
            if progress.step == steps:
                done.add(progress.case)
                bars.update(bar, visible=False)
                if not console.is_terminal:
                    console.print(f"{len(done)} of {len(cases)} done: {cases[progress.case]}", soft_wrap=True)

        yield show

"""A study's result on the terminal: a row per case, the paper's figures beside ours, the simulator's own speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from laminar.observability.plain_text import duration, percent, short_number
from laminar.simulation.report.figure_text import claim_text, figure_value, ratio_text
from laminar.simulation.study.paper_figures import Comparison, compare
from laminar.simulation.study.study_result import Case, StudyResult


def print_report(result: StudyResult, console: Console, explanations: Mapping[str, str]) -> None:
    """Print everything; figures that differ from the paper's are marked, with their explanation below."""
    for workload in dict.fromkeys(setting.workload for setting in result.settings()):
        console.print(case_table(result, workload, console.width))
    comparisons = compare(result, explanations)
    console.print(paper_table(comparisons))
    for one in comparisons:
        if one.differs:
            reason = one.explanation or "no explanation was given"
            console.print(f"[bold]![/bold] {escape(one.figure.what)}: {escape(reason)}", highlight=False)
    console.print(speed_line(result), highlight=False)


def case_table(result: StudyResult, workload: str, width: int) -> Table:
    """One row per case of a workload, in the order of the settings; a setting is named in its first row.

    Columns are left out where `width` characters do not hold all.
    """
    table = Table(
        title=escape(f"{result.name}, {workload}: modelled, not measured"),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    columns = [column for column in COLUMNS if column.always or width >= WIDTH_OF_ALL]
    table.add_column("model", no_wrap=True)
    table.add_column("GPUs", justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="left" if column.left else "right", no_wrap=True)
    order = result.schedules()
    for setting in result.settings():
        if setting.workload != workload:
            continue
        cases = [case for case in result.cases if case.setting == setting]
        cases.sort(key=lambda case: (order.index(case.schedule), not case.repack))
        for k, case in enumerate(cases):
            names = [setting.model, str(setting.gpus)] if k == 0 else ["", ""]
            table.add_row(*(escape(cell) for cell in names + [column.value(result, case) for column in columns]))
        table.add_section()
    return table


@dataclass(kw_only=True, slots=True, frozen=True)
class Column:
    """A figure of a case."""

    title: str
    value: Callable[[StudyResult, Case], str]
    left: bool = False
    always: bool = True  # also in a narrow table


def _schedule(result: StudyResult, case: Case) -> str:
    with_repack = result.case(case.setting, case.schedule, repack=True)
    return case.schedule if case.repack or with_repack is None else "  no repack"


def _over_synchronous(result: StudyResult, case: Case) -> str:
    base = result.case(case.setting, "synchronous")
    return f"{case.record.trained_tokens_per_s / base.record.trained_tokens_per_s:.2f}" if base else "-"


WIDTH_OF_ALL = 108
COLUMNS = (
    Column(title="rollouts +\ntrainer", value=lambda _, case: case.split, left=True, always=False),
    Column(title="tp", value=lambda _, case: str(case.tensor_parallel), always=False),
    Column(title="schedule", value=_schedule, left=True),
    Column(title="tokens/s", value=lambda _, case: short_number(case.record.trained_tokens_per_s)),
    Column(title="x\nsync", value=_over_synchronous),
    Column(title="step\ns", value=lambda _, case: f"{case.record.step_s:.1f}", always=False),
    Column(title="idle\ntrain.", value=lambda _, case: percent(case.record.trainer_idle_fraction)),
    Column(title="idle\nroll.", value=lambda _, case: percent(case.record.rollout_idle_fraction)),
    Column(title="KV", value=lambda _, case: percent(case.record.kv_utilization)),
    Column(
        title="staleness\nmean/max",
        value=lambda _, case: f"{case.record.staleness_mean:.2f}/{case.record.staleness_max}",
    ),
)


def paper_table(comparisons: list[Comparison]) -> Table:
    """The paper's figures beside ours, as far as the study has them."""
    table = Table(
        title="Beside the paper", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("figure")
    for title in ("paper", "ours", "ours/\npaper"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("of")
    shown = [(one, one.figure, one.ours) for one in comparisons if one.ours]
    for one, figure, ours in shown:
        what = figure.what + (" *" if figure.from_notes else "")
        cells = (what, claim_text(figure), figure_value(figure, ours.value), ratio_text(one), ours.of)
        table.add_row(*(escape(cell) for cell in cells))
    table.caption = (
        "Laminar paper, arXiv 2510.12633; * from public notes on it; ! off by more than 15 %. "
        f"{len(comparisons) - len(shown)} further figures of it need cases that this study has not run."
    )
    table.caption_justify = "left"
    return table


def speed_line(result: StudyResult) -> str:
    """How fast the simulator was."""
    seconds = sum(case.record.host_s for case in result.cases)
    events = sum(case.record.host_events for case in result.cases)
    virtual = sum(case.record.steps[-1].time_s for case in result.cases if case.record.steps)
    if not seconds:
        return "Simulated no runs"
    return (
        f"Simulated {len(result.cases)} runs, {duration(virtual)} of cluster time, in {duration(seconds)} of one core: "
        f"{short_number(events)} events, {short_number(events / seconds)} events/s"
    )

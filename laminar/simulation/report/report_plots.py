"""The plots of a study's page, as plotly figures; with `timeline_plot.py` the only modules that import plotly.

Invariants: a schedule has one colour in all plots, an activity another; axes name their unit.
"""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from laminar.observability.plain_text import short_number
from laminar.simulation.records.record import ACTIVITIES, Activity
from laminar.simulation.study.study_result import SCHEDULES, Case, Setting, StudyResult

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart.
SCHEDULE_COLOURS = {
    "synchronous": "#7f7f7f",
    "one_step": "#e69f00",
    "stream": "#56b4e9",
    "partial": "#cc79a7",
    "laminar": "#0072b2",
}
OTHER_COLOURS = ("#009e73", "#d55e00", "#b8a800", "#000000")  # a user's own schedules, in order
ACTIVITY_COLOURS = {
    "training": "#1b7837",
    "generating": "#5aae61",
    "publishing": "#00441b",
    "checkpointing": "#00692c",
    "long_tail": "#bfe5bb",
    "trajectories": "#b2182b",
    "trainer": "#ef8a62",
    "batch": "#fddbc7",
    "weights": "#fdb863",
    "pulling": "#e08214",
    "prompts": "#d9d9d9",
    "paused": "#bdbdbd",
}
OTHER_ACTIVITY_COLOUR = "#969696"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
CONFIG = {"displaylogo": False, "responsive": True}


def plotly_javascript() -> str:
    """The library that draws the plots, as it is put into the page."""
    return str(get_plotlyjs())


def schedule_name(schedule: str) -> str:
    """For a person."""
    return SCHEDULES.get(schedule, schedule)


def schedule_colour(result: StudyResult, schedule: str) -> str:
    """The same in all plots of a page."""
    if schedule in SCHEDULE_COLOURS:
        return SCHEDULE_COLOURS[schedule]
    others = [name for name in result.schedules() if name not in SCHEDULE_COLOURS]
    return OTHER_COLOURS[others.index(schedule) % len(OTHER_COLOURS)]


def activity(name: str) -> Activity:
    """A known one, or an idle state under its own name."""
    return ACTIVITIES.get(name) or Activity(label=name, kind="idle")


def throughput(result: StudyResult, workload: str) -> go.Figure:
    """Tokens per second over GPUs, a panel per model; below it the ratio to `synchronous`."""
    settings = [setting for setting in result.settings() if setting.workload == workload]
    models = list(dict.fromkeys(setting.model for setting in settings))
    figure = make_subplots(
        rows=2, cols=len(models), subplot_titles=models, vertical_spacing=0.16, horizontal_spacing=0.08
    )
    for column, model in enumerate(models, start=1):
        of_model = [setting for setting in settings if setting.model == model]
        rates: list[float] = []
        for schedule in result.schedules():
            cases = [case for setting in of_model if (case := result.case(setting, schedule))]
            style = {
                "name": schedule_name(schedule),
                "legendgroup": schedule,
                "showlegend": column == 1,
            }
            colour = schedule_colour(result, schedule)
            x = [str(case.gpus) for case in cases]
            y = [case.record.trained_tokens_per_s for case in cases]
            rates += y
            line = go.Scatter(
                x=x, y=y, mode="lines+markers", line={"color": colour}, marker={"size": 8}, cliponaxis=False, **style
            )
            figure.add_trace(line, row=1, col=column)
            speed_up = {ratio.setting.gpus: ratio.value for ratio in result.speed_up(schedule, "synchronous")
                        if ratio.setting in of_model}  # fmt: skip
            bars = go.Bar(
                x=[str(gpus) for gpus in speed_up],
                y=list(speed_up.values()),
                marker={"color": colour},
                **(style | {"showlegend": False}),
            )
            figure.add_trace(bars, row=2, col=column)
        sizes = [str(setting.gpus) for setting in of_model]
        for row in (1, 2):
            figure.update_xaxes(
                type="category", categoryorder="array", categoryarray=sizes, title_text="GPUs", row=row, col=column
            )
        ticks = log_ticks(min(rates), max(rates))
        figure.update_yaxes(
            type="log",
            tickvals=ticks,
            ticktext=[short_number(tick) for tick in ticks],
            range=[math.log10(min(rates) / 1.3), math.log10(max(rates) * 1.3)],
            row=1,
            col=column,
        )
    figure.update_yaxes(title_text="trained tokens per second", row=1, col=1)
    figure.update_yaxes(title_text="times synchronous", row=2, col=1)
    return _finish(figure, height=720, top=90)


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around these values, which are above 0."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    return [
        digit * 10.0**power for power in powers for digit in (1, 2, 5) if low / 2 <= digit * 10.0**power <= high * 2
    ]


def gpu_time(result: StudyResult, setting: Setting) -> go.Figure:
    """Stacked shares of all GPU seconds, a bar per schedule."""
    cases = result.cases_of(setting)
    names = [schedule_name(case.schedule) for case in cases]
    found = {name for case in cases for name in case.record.gpu_seconds}
    order = [name for name in ACTIVITIES if name in found] + sorted(found - set(ACTIVITIES))
    figure = go.Figure()
    for name in order:
        shares = [100 * case.record.share(name) for case in cases]
        figure.add_trace(
            go.Bar(
                y=names,
                x=shares,
                orientation="h",
                name=activity(name).label,
                marker={
                    "color": ACTIVITY_COLOURS.get(name, OTHER_ACTIVITY_COLOUR),
                    "pattern": {
                        "shape": "/" if activity(name).kind == "tail" else "",
                        "fillmode": "overlay",
                        "fgcolor": "#5aae61",
                        "solidity": 0.15,
                    },
                },
                text=[f"{share:.0f} %" if share >= 5 else "" for share in shares],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                hovertemplate="%{y}: %{x:.1f} % " + activity(name).label + "<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="share of all GPU seconds, %", range=[0, 100])
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=names, automargin=True)
    legend = 20 * math.ceil(len(order) / 3)
    return _finish(figure, height=120 + 42 * len(cases) + legend, top=55 + legend)


def staleness(result: StudyResult, setting: Setting) -> go.Figure:
    """Share of the trained trajectories per staleness, bars per schedule."""
    figure = go.Figure()
    cases = result.cases_of(setting)
    largest = max(case.record.staleness_max for case in cases)
    for case in cases:
        counts = case.record.staleness
        total = max(1, sum(counts.values()))
        values = list(range(min(counts, default=0), largest + 1))
        figure.add_trace(
            go.Bar(
                x=values,
                y=[100 * counts.get(value, 0) / total for value in values],
                **_style(result, case),
                hovertemplate="staleness %{x}: %{y:.1f} %",
            )
        )
    figure.update_xaxes(title_text="staleness, in versions", dtick=1)
    figure.update_yaxes(title_text="share of the trajectories, %")
    return _finish(figure, height=380)


def kv_utilization(result: StudyResult, setting: Setting) -> go.Figure:
    """Mean KV utilization of the rollouts over the run, a line per schedule."""
    figure = go.Figure()
    for case in result.cases_of(setting):
        record = case.record
        figure.add_trace(
            go.Scatter(
                x=[round((k + 0.5) * record.kv_bin_s / 60, 3) for k in range(len(record.kv_bins))],
                y=[round(100 * value, 2) for value in record.kv_bins],
                mode="lines",
                line={"color": schedule_colour(result, case.schedule), "width": 1.5},
                name=schedule_name(case.schedule),
                hovertemplate="%{x:.1f} min: %{y:.0f} %",
            )
        )
    figure.update_xaxes(title_text="minutes since the start of the run", rangemode="tozero")
    figure.update_yaxes(title_text="KV utilization, mean over rollouts, %", range=[0, 102])
    return _finish(figure, height=380)


def repack(result: StudyResult) -> go.Figure:
    """Generation throughput and KV utilization without and with repack, wherever both ran."""
    pairs = result.repack_pairs()
    titles = ("generated tokens per second, % of those without repack", "KV utilization, %")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    names = [f"{off.model}<br>{off.gpus} GPUs<br>{off.workload}" for off, _ in pairs]
    for which, label, colour in ((0, "without repack", "#9ecae1"), (1, "with repack", SCHEDULE_COLOURS["laminar"])):
        rates = [
            100 * pair[which].record.generated_tokens_per_s / pair[0].record.generated_tokens_per_s for pair in pairs
        ]
        kv = [100 * pair[which].record.kv_utilization for pair in pairs]
        for column, values in ((1, rates), (2, kv)):
            figure.add_trace(
                go.Bar(
                    x=names,
                    y=values,
                    name=label,
                    legendgroup=label,
                    showlegend=column == 1,
                    marker={"color": colour},
                    text=[f"{value:.0f}" for value in values],
                    textposition="outside",
                    cliponaxis=False,
                ),
                row=1,
                col=column,
            )
    figure.update_xaxes(automargin=True)
    return _finish(figure, height=470)


def _style(result: StudyResult, case: Case) -> dict[str, object]:
    return {"name": schedule_name(case.schedule), "marker": {"color": schedule_colour(result, case.schedule)}}


def _finish(figure: go.Figure, *, height: int, top: int = 80) -> go.Figure:
    """The looks that all plots share; the legend and plotly's buttons stand within `top` pixels above the plot."""
    figure.update_layout(
        template="none",
        height=height,
        font={"family": FONT, "size": 13, "color": "#222"},
        margin={"l": 70, "r": 20, "t": top, "b": 55},
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 1.0 - 24 / height,
            "yanchor": "top",
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
        },
        hoverlabel={"namelength": -1},
        bargap=0.25,
    )
    figure.update_xaxes(showgrid=False, zeroline=False, linecolor="#888", ticks="outside", tickcolor="#888")
    figure.update_yaxes(gridcolor="#e5e5e5", zeroline=False)
    return figure

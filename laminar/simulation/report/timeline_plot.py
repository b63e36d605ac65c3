"""The timeline of a few rollouts, as in the paper's figure 3: a panel per schedule, spans coloured by policy version."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from laminar.simulation.records.record import Lane, Span
from laminar.simulation.study.study_result import SCHEDULES, Setting, StudyResult

# From dark to light along viridis, so that neighbouring versions differ; the ninth version has the first colour again.
VERSION_COLOURS = ("#440154", "#fde725", "#31688e", "#7ad151", "#414487", "#22a884", "#bddf26", "#2a788e")
PULLING_COLOUR = "#d62728"
THINNEST = 0.1  # of a lane, for a span with next to no trajectories
LANE_PX = 15


def timeline(result: StudyResult, setting: Setting) -> go.Figure | None:
    """A bar is as thick as its rollout has trajectories; None if no run recorded any."""
    cases = [case for case in result.cases_of(setting) if case.record.timeline]
    if not cases:
        return None
    lanes = [len(case.record.timeline) for case in cases]
    height = 150 + sum(LANE_PX * count + 48 for count in lanes)
    figure = make_subplots(
        rows=len(cases),
        cols=1,
        shared_xaxes=True,
        row_heights=[float(count) for count in lanes],
        vertical_spacing=48 / height,
        subplot_titles=[SCHEDULES.get(case.schedule, case.schedule) for case in cases],
    )
    shown: set[str] = set()
    for row, case in enumerate(cases, start=1):
        for legend, trace in _traces(case.record.timeline):
            trace.showlegend = legend not in shown
            shown.add(legend)
            figure.add_trace(trace, row=row, col=1)
        names = [lane.name for lane in case.record.timeline]
        positions = list(range(len(names)))
        figure.update_yaxes(
            tickvals=positions, ticktext=names, range=[len(names) - 0.4, -0.6], row=row, col=1, tickfont={"size": 10}
        )
    figure.update_xaxes(showticklabels=True, showgrid=True, gridcolor="#eee", zeroline=False, rangemode="tozero")
    figure.update_xaxes(title_text="seconds since the end of the warm-up", row=len(cases), col=1)
    figure.update_yaxes(showgrid=False, zeroline=False, automargin=True)
    figure.update_layout(
        template="none",
        barmode="overlay",
        height=height,
        margin={"l": 90, "r": 20, "t": 90, "b": 50},
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 1.0 - 24 / height,
            "yanchor": "top",
            "x": 0,
            "traceorder": "normal",
        },
    )
    return figure


def _traces(lanes: list[Lane]) -> list[tuple[str, go.Bar]]:
    """(name in the legend, bars) by colour: generating and training by version, then pulling."""
    peak = max((span.running for lane in lanes for span in lane.spans if span.activity == "generating"), default=1)
    by_key: dict[tuple[str, int], list[tuple[int, str, Span]]] = {}
    for position, lane in enumerate(lanes):
        for span in lane.spans:
            if span.activity != "idle":
                version = -1 if span.activity == "pulling" else span.policy_version
                by_key.setdefault((span.activity, version), []).append((position, lane.name, span))
    order = {"generating": 0, "training": 1, "pulling": 2}
    keys = sorted(by_key, key=lambda key: (order[key[0]], key[1]))
    return [_bars(activity, version, by_key[activity, version], peak) for activity, version in keys]


def _bars(activity: str, version: int, spans: list[tuple[int, str, Span]], peak: int) -> tuple[str, go.Bar]:
    marker: dict[str, Any] = {"color": PULLING_COLOUR, "line": {"width": 0}}
    legend, hover = "loading weights", "loaded version %{customdata[2]}"
    widths = [0.9] * len(spans)
    if activity == "generating":
        legend, hover = f"version {version}", f"version {version}, " + "%{customdata[1]} trajectories"
        marker["color"] = VERSION_COLOURS[version % len(VERSION_COLOURS)]
        widths = [round(THINNEST + (0.9 - THINNEST) * min(1.0, span.running / peak), 2) for _, _, span in spans]
    elif activity == "training":
        legend, hover = "training", f"makes version {version} of " + "%{customdata[1]} groups"
        marker |= {"color": "#555", "line": {"width": 1, "color": "#fff"}}
    bars = go.Bar(
        y=[position for position, _, _ in spans],
        x=[round(span.end_s - span.start_s, 3) for _, _, span in spans],
        base=[span.start_s for _, _, span in spans],
        width=widths,
        orientation="h",
        name=legend,
        legendgroup=legend,
        marker=marker,
        customdata=[[name, span.running, span.policy_version] for _, name, span in spans],
        hovertemplate="%{customdata[0]}, from %{base:.1f} s: " + hover + "<extra></extra>",
    )
    return legend, bars

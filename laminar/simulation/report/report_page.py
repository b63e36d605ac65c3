"""A study's result as one HTML page that needs nothing else: no network, no other file, a browser alone.

Invariants: texts of a study are escaped; the page says of all its figures that they are modelled; the library that draws
the plots is in it once.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from laminar.observability.plain_text import percent, short_number
from laminar.simulation.report import report_plots
from laminar.simulation.report.figure_text import claim_text, figure_value, ratio_text
from laminar.simulation.report.report_style import SCRIPT, STYLE
from laminar.simulation.report.report_table import speed_line
from laminar.simulation.report.timeline_plot import timeline
from laminar.simulation.study.paper_figures import Comparison, compare
from laminar.simulation.study.study_result import Case, Setting, StudyResult

LOOK_AT = {
    "throughput": (
        "Upper row: prompt and response tokens that the trainer goes through per second; a line that rises as steeply as "
        "the number of GPUs scales perfectly. Lower row: the same divided by the synchronous schedule's."
    ),
    "repack": (
        "Repack empties rollouts that hold only a few long trajectories: look for more tokens per second at a higher KV "
        "utilization."
    ),
    "gpu_time": (
        "Green is work, the hatched part of it done with few trajectories left; all else is idle, with its cause. Look for "
        "the largest part of a bar that is not green: it is what the schedule loses."
    ),
    "staleness": (
        "How many versions older than the trainer's own the version was that made a trajectory: further left is more "
        "on-policy."
    ),
    "kv": (
        "Utilization at its ceiling means full batches; a saw-tooth is rollouts draining together at the end of each "
        "batch. Schedules end at different times because they run the same steps at different speeds."
    ),
    "timeline": (
        "One line per rollout, the trainer on top. Colour is the policy version that generates, thickness the number of "
        "trajectories, white is idle time. Look for thin long ends (stragglers) and for white that all rollouts share "
        "(a global barrier)."
    ),
}


def write_page(result: StudyResult, path: Path, explanations: Mapping[str, str]) -> None:
    """Write the page; `OSError` if that cannot be done."""
    path.write_text(page(result, explanations), encoding="utf-8")


def page(result: StudyResult, explanations: Mapping[str, str]) -> str:
    """The page; `explanations` say, by key of the paper's figure, why ours differs."""
    plots: dict[str, str] = {}
    sections = [_header(result)]
    if result.cases:
        sections += [
            _throughput(result, plots),
            _settings(result, plots),
            _repack(result, plots),
            _paper(compare(result, explanations)),
            _cases(result),
        ]
    sections.append(_assumptions(result))
    data = ",".join(f"{json.dumps(name)}:{figure}" for name, figure in plots.items()).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(result.name)}: a simulated study</title>",
            f"<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            "<noscript><p>The plots of this page need JavaScript; the tables do not.</p></noscript>",
            *sections,
            f"</main>\n<script>{report_plots.plotly_javascript()}</script>",
            f'<script type="application/json" id="plots">{{{data}}}</script>',
            f"<script>const CONFIG = {json.dumps(report_plots.CONFIG)};\n{SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


def _header(result: StudyResult) -> str:
    links = {"throughput": "Throughput", "settings": "One setting", "repack": "Repack", "paper": "Beside the paper"}
    links |= {"runs": "All runs", "assumptions": "Assumptions"}
    nav = " · ".join(f'<a href="#{anchor}">{text}</a>' for anchor, text in links.items())
    return (
        f"<h1>{html.escape(result.name)}</h1>\n<p>{html.escape(result.description)}</p>\n"
        "<p class=note><strong>All figures of this page are of a model, none was measured.</strong> Laminar's own controller "
        "ran on a virtual clock against modelled GPUs, networks and response lengths; the constants of the models and "
        f"their sources are in the last table.</p>\n<p>{html.escape(speed_line(result))}.</p>\n<nav>{nav}</nav>"
        if result.cases
        else f"<h1>{html.escape(result.name)}</h1>\n<p>{html.escape(result.description)}</p>\n<p>No case was run.</p>"
    )


def _plot(plots: dict[str, str], name: str, title: str, look_at: str, figure: str) -> str:
    plots[name] = figure
    return (
        f"<figure>\n<h3>{html.escape(title)}</h3>\n<p class=look>{html.escape(LOOK_AT[look_at])}</p>\n"
        f'<div class=plot data-plot="{html.escape(name)}"></div>\n</figure>'
    )


def _throughput(result: StudyResult, plots: dict[str, str]) -> str:
    workloads = list(dict.fromkeys(setting.workload for setting in result.settings()))
    parts = [
        _plot(
            plots,
            f"throughput-{k}",
            f"Training throughput, {workload}",
            "throughput",
            report_plots.throughput(result, workload).to_json(),
        )
        for k, workload in enumerate(workloads)
    ]
    return '<section id="throughput">\n<h2>Throughput</h2>\n' + "\n".join(parts) + "\n</section>"


def _settings(result: StudyResult, plots: dict[str, str]) -> str:
    """The plots of one setting at a time; the one with the most schedules is shown first, the largest of them."""
    settings = result.settings()
    first = max(settings, key=lambda setting: (len(result.cases_of(setting)), setting.gpus))
    options, parts = [], []
    for k, setting in enumerate(settings):
        chosen = " selected" if setting == first else ""
        options.append(f"<option value={k}{chosen}>{html.escape(str(setting))}</option>")
        hidden = "" if setting == first else " hidden"
        parts.append(f"<div class=setting data-setting={k}{hidden}>\n{_setting(result, setting, k, plots)}\n</div>")
    return (
        '<section id="settings">\n<h2>One setting: where the time goes</h2>\n'
        f"<p><label>Setting: <select id=setting>{''.join(options)}</select></label></p>\n"
        + "\n".join(parts)
        + "\n</section>"
    )


def _setting(result: StudyResult, setting: Setting, k: int, plots: dict[str, str]) -> str:
    of = f", {setting}"
    parts = [
        _plot(
            plots,
            f"gpu-{k}",
            f"GPU time by cause{of}",
            "gpu_time",
            report_plots.gpu_time(result, setting).to_json(),
        ),
        _plot(
            plots,
            f"staleness-{k}",
            f"Staleness of the trained trajectories{of}",
            "staleness",
            report_plots.staleness(result, setting).to_json(),
        ),
        _plot(
            plots,
            f"kv-{k}",
            f"KV utilization over time{of}",
            "kv",
            report_plots.kv_utilization(result, setting).to_json(),
        ),
    ]
    if (figure := timeline(result, setting)) is not None:
        parts.append(_plot(plots, f"timeline-{k}", f"Timeline of rollouts{of}", "timeline", figure.to_json()))
    return "\n".join(parts)


def _repack(result: StudyResult, plots: dict[str, str]) -> str:
    heading = '<section id="repack">\n<h2>Repack</h2>\n'
    if not result.repack_pairs():
        return heading + "<p>This study ran no setting both with and without repack.</p>\n</section>"
    plot = _plot(plots, "repack", "Without and with repack", "repack", report_plots.repack(result).to_json())
    rows = [
        [
            f"{on.setting}",
            on.schedule,
            str(on.record.repack.repacks),
            str(on.record.repack.moves),
            str(on.record.repack.trajectories_moved),
            short_number(on.record.repack.tokens_moved),
            f"{on.record.repack.overhead_s:.2f}",
        ]
        for _, on in result.repack_pairs()
    ]
    titles = ("setting", "schedule", "repacks", "rollouts freed", "trajectories moved", "tokens moved", "seconds each")
    return heading + plot + _table(titles, rows, numbers=range(2, 7)) + "</section>"


def _paper(comparisons: Sequence[Comparison]) -> str:
    rows, classes = [], []
    for one in comparisons:
        figure = one.figure
        ours = figure_value(figure, one.ours.value) if one.ours else "-"
        of = one.ours.of if one.ours else figure.not_simulated or "not run in this study"
        why = one.explanation or ("not explained" if one.differs else "")
        rows.append([figure.what, claim_text(figure), ours, ratio_text(one), of, why, figure.source])
        classes.append("differs" if one.differs else "absent" if one.ours is None else "")
    titles = ("figure", "paper", "ours", "ours / paper", "ours is of", "why it differs", "source of the paper's figure")
    return (
        '<section id="paper">\n<h2>Beside the paper</h2>\n<p>Every figure of the paper that this project knows, beside '
        "the model's. Rows in colour differ by more than 15 % in the direction that contradicts the paper. No constant "
        "was chosen to meet any of them.</p>\n"
        + _table(titles, rows, numbers=range(1, 4), classes=classes)
        + "</section>"
    )


def _cases(result: StudyResult) -> str:
    rows = [_case(result, case) for case in result.cases]
    titles = ["model", "GPUs", "rollouts + trainer", "tensor parallel", "workload", "schedule", "repack", "tokens/s"]
    titles += ["x synchronous", "step, s", "trainer idle", "rollouts idle", "KV utilization", "staleness mean / max"]
    titles += ["mixed versions", "wait for weights, s", "simulated in, s"]
    numbers = [1, 3, *range(7, len(titles))]
    return '<section id="runs">\n<h2>All runs</h2>\n' + _table(titles, rows, numbers=numbers) + "</section>"


def _case(result: StudyResult, case: Case) -> list[str]:
    record = case.record
    base = result.case(case.setting, "synchronous")
    wait = record.weights.wait_s
    return [
        case.model,
        str(case.gpus),
        case.split,
        str(case.tensor_parallel),
        case.workload,
        report_plots.schedule_name(case.schedule),
        "yes" if case.repack else "no",
        short_number(record.trained_tokens_per_s),
        f"{record.trained_tokens_per_s / base.record.trained_tokens_per_s:.2f}" if base else "-",
        f"{record.step_s:.1f}",
        percent(record.trainer_idle_fraction),
        percent(record.rollout_idle_fraction),
        percent(record.kv_utilization),
        f"{record.staleness_mean:.2f} / {record.staleness_max}",
        percent(record.mixed_version_fraction),
        "-" if wait is None else f"{wait:.1f}",
        f"{record.host_s:.1f}",
    ]


def _assumptions(result: StudyResult) -> str:
    rows = [
        [one.name, one.value if isinstance(one.value, str) else f"{one.value:g}", one.unit, one.source]
        for one in result.assumptions
    ]
    return (
        '<section id="assumptions">\n<h2>Assumptions</h2>\n<p>One set of constants for all cases.</p>\n'
        + _table(("constant", "value", "unit", "source"), rows, numbers=(1,))
        + "</section>"
    )


def _table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int], classes: Sequence[str] = ()
) -> str:
    """Columns whose index is in `numbers` stand right."""

    def row(cells: Sequence[str], tag: str, name: str = "") -> str:
        of_row = f' class="{name}"' if name else ""
        inner = "".join(
            f"<{tag}{' class=n' if k in numbers else ''}>{html.escape(cell)}</{tag}>" for k, cell in enumerate(cells)
        )
        return f"<tr{of_row}>{inner}</tr>"

    body = "\n".join(row(cells, "td", classes[k] if classes else "") for k, cells in enumerate(rows))
    return f"<div class=wide><table>\n<thead>{row(titles, 'th')}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n"

from __future__ import annotations

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import plotly.graph_objects as go
import pytest

from laminar.simulation.records.record import ACTIVITIES
from laminar.simulation.report import report_plots
from laminar.simulation.report.report_page import page, write_page
from laminar.simulation.report.timeline_plot import timeline
from laminar.simulation.study.paper_figures import PAPER_FIGURES
from laminar.simulation.study.study_result import SCHEDULES, StudyResult
from tests.simulation.synthetic_study import case, study


class Tags(HTMLParser):
    """The tags that are open, what they load, and the plots' places."""

    VOID = ("meta", "br", "hr", "img", "input", "link")

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.places, self.ids, self.links = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        if "src" in attributes or tag == "link":
            self.loads.append((tag, attributes))
        if "data-plot" in attributes:
            self.places.append(attributes["data-plot"])
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if attributes.get("href", "").startswith("#"):
            self.links.append(attributes["href"][1:])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def small():
    return study(models=("qwen2.5-7b", "qwen2.5-32b"), workloads=("math",), sizes=(64, 256))


@pytest.fixture(scope="module")
def text():
    return page(small(), {"math_over_synchronous_max": "because of <tails>"})


@pytest.fixture(scope="module")
def plots(text):
    return json.loads(re.search(r'<script type="application/json" id="plots">(.*?)</script>', text, re.S)[1])


def numbers(values):
    """A trace's values, which plotly may have packed."""
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).tolist()
    return list(values)


def test_the_page_is_one_file_that_loads_nothing(text, tmp_path):
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.loads == []
    assert len(tags.ids) == len(set(tags.ids))
    assert set(tags.links) <= set(tags.ids)
    path = tmp_path / "study.html"
    write_page(small(), path, {"math_over_synchronous_max": "because of <tails>"})
    assert path.read_text(encoding="utf-8") == text


def test_the_library_is_in_it_once(text):
    assert text.count("plotly.js v") == 1


def test_every_place_has_its_plot_and_every_plot_its_place(text, plots):
    tags = Tags()
    tags.feed(text)
    assert sorted(tags.places) == sorted(plots)
    assert len([name for name in plots if name.startswith("gpu-")]) == 4
    assert {"throughput-0", "timeline-0", "staleness-0", "kv-0", "repack"} <= set(plots)


def test_plots_are_valid_to_plotly_and_name_their_units(plots):
    for name, plot in plots.items():
        figure = go.Figure(plot)  # raises on what plotly does not know
        titles = [axis.title.text for axis in figure.select_xaxes()] + [
            axis.title.text for axis in figure.select_yaxes()
        ]
        assert any(titles) or name == "repack", name  # there the panels' titles say it


def test_a_schedule_has_one_colour_in_all_plots(plots):
    colours = {}
    for name, plot in plots.items():
        if not name.startswith(("throughput", "staleness", "kv")):
            continue
        for trace in plot["data"]:
            colour = trace.get("marker", {}).get("color") or trace["line"]["color"]
            colours.setdefault(trace["name"], set()).add(colour)
    assert colours.keys() == set(SCHEDULES.values())
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == len(SCHEDULES)


def test_a_users_own_schedule_gets_a_colour_and_its_name():
    mine = dataclasses.replace(case("laminar", repack=False), schedule="my.module:mine")
    result = StudyResult(name="x", description="", assumptions=[], cases=[mine, case("synchronous")])
    assert report_plots.schedule_colour(result, "my.module:mine") not in report_plots.SCHEDULE_COLOURS.values()
    assert "my.module:mine" in page(result, {})


def test_gpu_time_adds_up_to_everything(plots):
    shares = {}
    for trace in plots["gpu-0"]["data"]:
        for schedule, share in zip(trace["y"], numbers(trace["x"]), strict=True):
            shares[schedule] = shares.get(schedule, 0.0) + share
    assert shares == pytest.approx(dict.fromkeys(SCHEDULES.values(), 100.0), abs=0.1)


def test_every_activity_has_a_colour_of_its_own():
    assert set(report_plots.ACTIVITY_COLOURS) == set(ACTIVITIES)
    assert len(set(report_plots.ACTIVITY_COLOURS.values())) == len(ACTIVITIES)


def test_timeline_has_a_panel_per_schedule_and_a_colour_per_version():
    result = small()
    figure = timeline(result, result.settings()[0])
    assert [note.text for note in figure.layout.annotations] == list(SCHEDULES.values())
    colours = {}
    for trace in figure.data:
        if trace.name.startswith("version"):
            colours.setdefault(trace.name, set()).add(trace.marker.color)
    assert list(colours) == ["version 3", "version 4", "version 5"]
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 3
    assert len([trace for trace in figure.data if trace.showlegend]) == len({trace.name for trace in figure.data})
    full, thin = max(figure.data[0].width), min(figure.data[0].width)
    assert full == pytest.approx(0.9)
    assert thin < 0.2


def test_tables_say_what_differs_and_why(text):
    for figure in PAPER_FIGURES:
        assert figure.what.replace('"', "&quot;").replace("'", "&#x27;") in text
    assert "because of &lt;tails&gt;" in text
    assert "not explained" in text
    assert "NVIDIA data sheet" in text
    assert "none was measured" in text


def test_texts_of_a_study_are_escaped():
    evil = "</script><script>alert(1)</script>"
    mine = dataclasses.replace(case("laminar"), model=evil, workload=evil)
    text = page(StudyResult(name=evil, description=evil, assumptions=[], cases=[mine]), {})
    assert "<script>alert" not in text


def test_one_schedule_alone_can_be_shown():
    text = page(StudyResult(name="one", description="", assumptions=[], cases=[case("laminar")]), {})
    assert "ran no setting both with and without repack" in text


def test_a_study_without_cases_can_be_shown():
    assert "No case was run" in page(StudyResult(name="empty", description="", assumptions=[]), {})


def test_log_ticks_are_round():
    assert report_plots.log_ticks(900.0, 12_000.0) == [500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0]

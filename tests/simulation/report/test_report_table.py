from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from laminar.simulation.report.report_table import print_report
from laminar.simulation.study.study_result import StudyResult
from tests.simulation.synthetic_study import study


def printed(result, width=120, explanations=None):
    out = io.StringIO()
    print_report(result, Console(file=out, width=width), explanations or {})
    return out.getvalue()


def small():
    return study(models=("qwen2.5-7b",), workloads=("math",), sizes=(64, 256))


def test_a_row_per_case_with_its_figures():
    text = printed(small())
    row = next(line for line in text.splitlines() if " laminar " in line)
    assert row.split() == ["48+16", "1", "laminar", "105.6k", "2.50", "465.6", "10", "%", "5", "%", "82", "%", "1.24/4"]
    rows = [line for line in text.splitlines() if " + " not in line and ("48+16" in line or "64 shared" in line)]
    assert len(rows) == 6
    assert "no repack" in text
    assert text.count("qwen2.5-7b    64") == 1


def test_each_workload_has_a_table():
    text = printed(study(models=("qwen2.5-7b",), sizes=(64,)))
    assert "paper, math: modelled, not measured" in text
    assert "paper, tools: modelled, not measured" in text


@pytest.mark.parametrize("width", [80, 108, 120, 200])
def test_no_figure_is_cut_at_any_width(width):
    text = printed(study(models=("qwen2.5-72b",), workloads=("math",), sizes=(1024,)), width)
    assert "…" not in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())


def test_differences_are_marked_and_explained():
    text = printed(small(), explanations={"math_over_synchronous_max": "tails [as in] the paper are longer"})
    assert "0.46 !" in text
    assert "! math: largest speed-up over verl (synchronous): tails [as in] the paper are longer" in text
    assert "no explanation was given" in text  # of the scaling efficiency


def test_speed_of_the_simulator_comes_last():
    assert "Simulated 11 runs" in printed(small()).splitlines()[-1]
    assert "4.4M events, 114.3k events/s" in printed(small(), 200).splitlines()[-1]


def test_names_are_not_taken_as_markup():
    assert "[red]x[/red]" in printed(dataclasses.replace(small(), name="[red]x[/red]"))


def test_a_study_without_cases_can_be_shown():
    assert "no runs" in printed(StudyResult(name="empty", description="", assumptions=[]))

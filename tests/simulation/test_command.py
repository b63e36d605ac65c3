from __future__ import annotations

import json
import subprocess
import sys

import pytest

from laminar.cli import main
from laminar.simulation.report.report_json import read_json
from laminar.simulation.study.explanations import EXPLANATIONS
from laminar.simulation.study.paper_figures import PAPER_FIGURES
from tests.simulation.study_files import study_file


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulate(*arguments):
    return main(["simulate", *map(str, arguments)])


def test_it_prints_the_table_and_writes_the_page_under_the_studys_name(here, capsys):
    assert simulate(study_file(here), "--set", "schedules=[synchronous, laminar]", "--processes", 1) == 0
    output = capsys.readouterr().out
    assert "small, math: modelled, not measured" in output
    assert "Page: runs/simulations/small.html" in output
    assert "All figures of this page are of a model" in (here / "runs/simulations/small.html").read_text()


def test_json_on_standard_output_is_alone_there(here, capsys):
    assert simulate(study_file(here), "--set", "schedules=[synchronous]", "--json", "-", "--processes", 1) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["cases"][0]["schedule"] == "synchronous"
    assert "modelled, not measured" in captured.err


def test_files_go_where_they_are_told_to(here):
    arguments = ["--set", "schedules=[synchronous]", "--json", here / "out/a.json", "--html", here / "out/b.html"]
    assert simulate(study_file(here), *arguments, "--processes", 1) == 0
    assert read_json(here / "out/a.json").name == "small"
    assert (here / "out/b.html").exists()
    assert not (here / "runs").exists()


def test_every_explanation_is_of_a_figure_that_a_study_can_have():
    of_studies = {figure.key for figure in PAPER_FIGURES if not figure.not_simulated}
    assert set(EXPLANATIONS) <= of_studies


def test_a_figure_that_differs_has_its_explanation_on_the_terminal_and_on_the_page(here, capsys):
    # On 16 GPUs with short lengths nothing is as in the paper.
    assert simulate(study_file(here), "--set", "schedules=[synchronous, laminar]", "--processes", 1) == 0
    assert "no explanation was given" not in capsys.readouterr().out
    assert "not explained" not in (here / "runs/simulations/small.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.yaml"], "none.yaml: no such file"),
        ([], "give the CONFIG of a study"),
        (["study.yaml", "--faults"], "--faults takes no CONFIG"),
        (["--faults", "--json", "-"], "--faults takes no --json"),
        (["--faults", "--seed", "1", "--seeds", "3"], "leave out --seeds"),
        (["study.yaml", "--seeds", "3"], "--seeds belong to --faults"),
        (["study.yaml", "--seed", "0"], "--seed belong to --faults"),
        (["study.yaml", "--processes", "0"], "--processes: 0; expected 1 or more"),
        (["study.yaml", "--set", "sizes=[1]"], "too few for one rollout beside a trainer"),
        (["study.yaml", "--html", "study.yaml/page.html"], "--html: study.yaml/page.html cannot be written"),
        (["study.yaml", "--json", "."], "--json: . cannot be written"),
    ],
)
def test_a_users_mistake_is_one_message_and_status_2(here, capsys, arguments, says):
    study_file(here)
    assert simulate(*arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
    assert not list(here.glob("runs/**/*.html"))


def test_a_file_that_was_there_is_kept_when_the_study_is_refused(here, capsys):
    page = here / "page.html"
    page.write_text("old")
    assert simulate(study_file(here), "--html", page, "--json", "missing.yaml/x.json", "--set", "steps=1") == 2
    assert page.read_text() == "old"


def test_help_says_what_it_is_for(capsys):
    with pytest.raises(SystemExit) as exit:
        simulate("--help")
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for word in ("What would this schedule do", "--faults", "--processes", "configs/simulation/quick.yaml"):
        assert word in text


def test_the_command_line_loads_no_simulator_before_it_is_needed():
    code = "import sys, laminar.cli; laminar.cli.parser(); print('numpy' in sys.modules or 'rich' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "False"

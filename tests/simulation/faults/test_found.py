"""Fault schedules under which the controller once broke a promise, as small as they got. Each file's name says what was wrong."""

from pathlib import Path

import pytest

from laminar.config.checks import check_config
from laminar.simulation.faults.fault_schedule import FaultSchedule
from laminar.simulation.faults.run_schedule import run_schedule

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


def test_there_are_some():
    assert FOUND


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_it_stays_mended(path):
    schedule = FaultSchedule.from_json(path.read_text(encoding="utf-8"))
    check_config(schedule.config)
    run = run_schedule(schedule)
    assert not run.violated, run.report

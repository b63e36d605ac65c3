from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path

import pytest

from laminar.simulation.models.hardware import CONSTANTS, Constants
from laminar.simulation.report.report_json import to_json
from laminar.simulation.study.config import load_study
from laminar.simulation.study.plan import plan_cases
from laminar.simulation.study.run_study import run_study
from tests.simulation.study_files import study_file

SCHEDULES = "schedules=[synchronous, laminar, {name: laminar, repack: true}]"


def run(folder, *overrides, processes=1, show=lambda _: None):
    config = load_study(study_file(folder), overrides)
    return run_study(config, plan_cases(config), processes=processes, show=show)


def without_host_times(result):
    """All that a study finds out, as JSON: the simulator's own speed left out."""
    cases = [dataclasses.replace(case, record=dataclasses.replace(case.record, host_s=0.0)) for case in result.cases]
    return to_json(dataclasses.replace(result, cases=cases), {})


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(tmp_path_factory.mktemp("study"), SCHEDULES)


def test_every_case_runs_its_steps_and_measures_those_after_the_warm_up(result):
    assert [(case.schedule, case.repack) for case in result.cases] == [
        ("synchronous", False),
        ("laminar", False),
        ("laminar", True),
    ]
    for case in result.cases:
        assert [step.step for step in case.record.steps] == [1, 2, 3, 4]
        assert case.record.warm_up_steps == 1
        assert sum(case.record.staleness.values()) == 3 * 8 * 4
        assert case.record.trained_tokens_per_s > 0


def test_gpus_are_divided_as_planned(result):
    synchronous, laminar = result.cases[:2]
    assert synchronous.split == "16 shared"
    assert laminar.split == f"{laminar.rollout_gpus}+{16 - laminar.rollout_gpus}"


def test_synchronous_is_on_policy_and_laminar_stays_within_its_bound(result):
    assert result.cases[0].record.staleness_max == 0
    assert 0 < result.cases[1].record.staleness_max <= 4


def test_cases_with_and_without_repack_are_alike_otherwise(result):
    assert [(off.repack, on.repack) for off, on in result.repack_pairs()] == [(False, True)]


def steps_shown(seen):
    for case in {one.case for one in seen}:
        clocks = [one.time_s for one in seen if one.case == case]
        assert clocks == sorted(clocks)
    return sorted((one.case, one.step) for one in seen)


def test_the_number_of_processes_changes_nothing_and_every_step_is_shown(tmp_path, result):
    seen = []
    again = run(tmp_path, SCHEDULES, processes=2, show=seen.append)
    assert without_host_times(again) == without_host_times(result)
    assert steps_shown(seen) == [(case, step) for case in range(3) for step in (1, 2, 3, 4)]


def test_another_seed_gives_other_figures(tmp_path, result):
    other = run(tmp_path, "schedules=[synchronous]", "seed=1")
    assert other.cases[0].record.trained_tokens_per_s != result.cases[0].record.trained_tokens_per_s


def test_every_step_is_shown_without_other_processes(tmp_path):
    seen = []
    run(tmp_path, "schedules=[synchronous]", show=seen.append)
    assert steps_shown(seen) == [(0, step) for step in (1, 2, 3, 4)]


def test_a_case_that_fails_in_another_process_fails_the_study(tmp_path, monkeypatch):
    config = load_study(study_file(tmp_path), ["schedules=[synchronous, one_step]"])
    cases = plan_cases(config)
    broken = dataclasses.replace(cases[1].models, kv_capacity_tokens=10)
    cases[1] = dataclasses.replace(cases[1], models=broken)
    before = multiprocessing.active_children()
    with pytest.raises(Exception, match="kv_capacity_tokens: 10"):
        run_study(config, cases, processes=2)
    own = [process for process in multiprocessing.active_children() if process not in before]
    # Not by `is_alive`: two threads wait for a process of the pool, and the one that comes second never learns of its end.
    assert [process for process in own if Path(f"/proc/{process.pid}").exists()] == []


def test_every_constant_is_among_the_assumptions_with_its_source(result):
    found = {one.name: one for one in result.assumptions}
    for field in dataclasses.fields(Constants):
        one = found[field.name.replace("_", " ")]
        assert one.value == getattr(CONSTANTS, field.name)
    without = [
        name.replace("_", " ")
        for name in ("decode_bandwidth_share", "training_flops_share", "nic_bandwidth")
        if len(found[name.replace("_", " ")].source) < 20
    ]
    assert without == []
    assert found["prompts"].value == "200, all alike"
    assert found["responses"].value == "log-normal, median 100, 99th percentile 800, cut at 1000"
    assert found["tensor parallel degree"].value == "Qwen2.5-7B: 1"


def test_a_figure_of_the_studys_own_is_named_as_its_source(tmp_path):
    found = {one.name: one for one in run(tmp_path, "schedules=[synchronous]", "hardware.nic_gbit_s=100").assumptions}
    assert (found["nic bandwidth"].value, found["nic bandwidth"].source) == (12.5e9, "this study's config")
    assert "this study's config" not in found["relay latency s"].source


def test_tool_calls_make_trajectories_longer(tmp_path):
    plain = run(tmp_path, "schedules=[synchronous]").cases[0].record
    tools = "{calls_min: 1, calls_max: 4, latency_median_s: 1, latency_p99_s: 20, latency_limit_s: 60}"
    slow = run(tmp_path, "schedules=[synchronous]", f"workload.tools={tools}").cases[0].record
    assert slow.trajectory_s.mean > plain.trajectory_s.mean + 1

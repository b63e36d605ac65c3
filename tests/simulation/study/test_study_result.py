from __future__ import annotations

import dataclasses

import pytest

from laminar.simulation.study.study_result import Setting, StudyResult
from tests.simulation.synthetic_study import case, study, with_rate

SMALL = Setting(workload="math", model="qwen2.5-7b", gpus=64)


def result_of(*cases):
    return StudyResult(name="test", description="", assumptions=[], cases=list(cases))


def test_settings_keep_the_order_of_workloads_and_models_and_sort_sizes():
    result = result_of(
        case("laminar", gpus=256, workload="tools"),
        case("laminar", gpus=64, workload="tools"),
        case("laminar", gpus=64, model="qwen2.5-32b"),
        case("laminar", gpus=64),
    )
    assert [str(setting) for setting in result.settings()] == [
        "qwen2.5-7b, 64 GPUs, tools",
        "qwen2.5-7b, 256 GPUs, tools",
        "qwen2.5-7b, 64 GPUs, math",
        "qwen2.5-32b, 64 GPUs, math",
    ]


def test_schedules_come_in_one_order_and_others_after_them():
    mine = dataclasses.replace(case("laminar"), schedule="my.module:schedule")
    assert result_of(mine, case("laminar"), case("synchronous")).schedules() == [
        "synchronous",
        "laminar",
        "my.module:schedule",
    ]


def test_the_fastest_split_stands_for_a_schedule():
    slow, fast = with_rate(case("stream"), 10.0, rollout_gpus=32), with_rate(case("stream"), 20.0, rollout_gpus=48)
    assert result_of(slow, fast).case(SMALL, "stream") is fast
    assert result_of(slow, fast).case(SMALL, "laminar") is None


def test_with_repack_stands_for_a_schedule_even_where_it_is_slower():
    off, on = with_rate(case("laminar", repack=False), 20.0), with_rate(case("laminar"), 10.0)
    result = result_of(off, on)
    assert result.case(SMALL, "laminar") is on
    assert result.case(SMALL, "laminar", repack=False) is off
    assert result_of(off).case(SMALL, "laminar") is off


def test_speed_up_is_per_setting_in_which_both_ran():
    result = result_of(
        with_rate(case("synchronous"), 10.0),
        with_rate(case("laminar"), 25.0),
        with_rate(case("laminar", gpus=256), 99.0),
        with_rate(case("synchronous", workload="tools"), 10.0),
        with_rate(case("laminar", workload="tools"), 30.0),
    )
    assert [ratio.value for ratio in result.speed_up("laminar", "synchronous")] == [2.5, 3.0]
    assert [ratio.value for ratio in result.speed_up("laminar", "synchronous", workload="tools")] == [3.0]


def test_scaling_efficiency_is_against_the_smallest_size():
    result = result_of(
        with_rate(case("laminar", gpus=256), 300.0), with_rate(case("laminar"), 100.0), with_rate(case("laminar", gpus=1024), 800.0)
    )  # fmt: skip
    ratios = result.scaling_efficiency("laminar")
    assert [(ratio.setting.gpus, ratio.value) for ratio in ratios] == [(256, 0.75), (1024, 0.5)]


def test_repack_pairs_need_the_same_split():
    off, on = case("laminar", repack=False), case("laminar")
    other = dataclasses.replace(on, rollout_gpus=1)
    assert result_of(off, on, other).repack_pairs() == [(off, on)]


def test_split_says_whether_gpus_are_shared():
    assert case("synchronous").split == "64 shared"
    assert case("laminar").split == "48+16"


def test_shares_of_gpu_time_add_up():
    record = study().cases[0].record
    assert sum(record.share(name) for name in record.gpu_seconds) == pytest.approx(1.0)
    assert record.share("nothing of the kind") == 0.0

from __future__ import annotations

import dataclasses

import pytest

from laminar.simulation.study.paper_figures import NOTES, PAPER, PAPER_FIGURES, Comparison, compare
from laminar.simulation.study.study_figures import Ours
from laminar.simulation.study.study_result import StudyResult
from tests.simulation.synthetic_study import case, study, with_rate

EMPTY = StudyResult(name="empty", description="", assumptions=[])


def ours(result, key):
    return next(one for one in compare(result, {}) if one.figure.key == key).ours


def with_record(one, **changes):
    return dataclasses.replace(one, record=dataclasses.replace(one.record, **changes))


def result_of(*cases):
    return dataclasses.replace(EMPTY, cases=list(cases))


def test_keys_are_unique():
    keys = [figure.key for figure in PAPER_FIGURES]
    assert len(keys) == len(set(keys))


def test_figures_of_notes_are_told_from_the_papers_own():
    sources = {figure.key: figure.source for figure in PAPER_FIGURES}
    assert sources["generation_share"] == sources["broadcast_72b"] == PAPER
    assert sources["math_over_synchronous"] == sources["repack_throughput"] == NOTES


def test_a_study_without_cases_has_no_figure():
    assert [one.ours for one in compare(EMPTY, {})] == [None] * len(PAPER_FIGURES)
    assert not any(one.differs for one in compare(EMPTY, {}))


def test_a_full_study_has_every_figure_that_can_be_simulated():
    missing = {one.figure.key for one in compare(study(), {}) if one.ours is None}
    assert missing == {figure.key for figure in PAPER_FIGURES if figure.not_simulated}


def test_speed_ups_are_mean_and_maximum_over_the_settings_of_a_workload():
    result = result_of(
        with_rate(case("synchronous"), 10.0),
        with_rate(case("laminar"), 20.0),
        with_rate(case("synchronous", gpus=256), 10.0),
        with_rate(case("laminar", gpus=256), 40.0),
        with_rate(case("synchronous", workload="tools"), 10.0),
        with_rate(case("laminar", workload="tools"), 90.0),
    )
    assert ours(result, "math_over_synchronous") == Ours(value=3.0, of="mean of 2 settings")
    assert ours(result, "math_over_synchronous_max") == Ours(value=4.0, of="qwen2.5-7b, 256 GPUs, math")
    assert ours(result, "tools_over_synchronous").value == 9.0
    assert ours(result, "math_over_stream") is None


def test_scaling_efficiency_is_of_the_largest_size_and_mean_over_models():
    result = result_of(
        with_rate(case("laminar"), 100.0),
        with_rate(case("laminar", gpus=256), 399.0),
        with_rate(case("laminar", gpus=1024), 800.0),
        with_rate(case("laminar", model="qwen2.5-32b"), 100.0),
        with_rate(case("laminar", model="qwen2.5-32b", gpus=1024), 1120.0),
    )
    assert ours(result, "scaling_efficiency").value == pytest.approx(60.0)
    assert ours(result, "scaling_efficiency_32b").value == pytest.approx(70.0)


def test_weights_figures_are_of_their_model_and_the_most_relays():
    weights = case("laminar").record.weights
    result = result_of(
        case("laminar", model="qwen2.5-32b"),
        with_record(case("laminar", model="qwen2.5-72b"), weights=dataclasses.replace(weights, broadcast_s=1.0)),
        with_record(
            case("laminar", model="qwen2.5-72b", gpus=1024), weights=dataclasses.replace(weights, broadcast_s=1.5)
        ),
    )
    assert ours(result, "broadcast_72b") == Ours(value=1.5, of="qwen2.5-72b, 1024 GPUs, math, 128 relays")
    assert ours(result, "publish_stall_32b").value == 0.6


def test_repack_figures_compare_with_and_without():
    off, on = case("laminar", repack=False), case("laminar")
    result = result_of(off, on)
    assert ours(result, "repack_throughput").value == pytest.approx(25.0)
    assert ours(result, "repack_kv_off").value == pytest.approx(70.0)
    assert ours(result, "repack_kv_on").value == pytest.approx(82.0)
    assert ours(result, "repack_overhead").value == pytest.approx(0.7)
    assert ours(result, "repack_latency").value == pytest.approx(1.0)
    assert ours(result_of(on), "repack_throughput") is None


def test_staleness_generation_share_waits_and_skew():
    result = result_of(case("synchronous"), case("laminar"))
    assert ours(result, "staleness_below_3").value == pytest.approx(100 * 7500 / 8192)
    assert ours(result, "staleness_max").value == 4
    assert ours(result, "generation_share").value == pytest.approx(80.0)
    assert ours(result, "wait_for_weights").value == pytest.approx(100 * (1 - 3.5 / 6))
    assert ours(result, "length_skew").value == pytest.approx(16 / 3)


@pytest.mark.parametrize(
    ("claim", "value", "differs"),
    [
        ("equal", 1.14, False),
        ("equal", 0.86, False),
        ("equal", 1.16, True),
        ("equal", 0.84, True),
        ("at_most", 0.1, False),
        ("at_most", 1.2, True),
        ("at_least", 3.0, False),
        ("at_least", 0.5, True),
    ],
)
def test_what_differs_depends_on_what_the_paper_claims(claim, value, differs):
    figure = dataclasses.replace(PAPER_FIGURES[0], value=2.0, claim=claim)
    one = Comparison(figure=figure, ours=Ours(value=2 * value, of=""), explanation="")
    assert one.ratio == pytest.approx(value)
    assert one.differs is differs
    assert one.unexplained is differs
    assert not dataclasses.replace(one, explanation="lengths").unexplained


def test_explanations_come_by_key():
    result = result_of(with_rate(case("synchronous"), 10.0), with_rate(case("laminar"), 99.0))
    one = compare(result, {"math_over_synchronous": "longer tails"})[0]
    assert (one.differs, one.explanation) == (True, "longer tails")

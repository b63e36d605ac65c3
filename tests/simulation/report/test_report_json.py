from __future__ import annotations

import json

import pytest

from laminar.errors import UserError
from laminar.simulation.report.report_json import read_json, to_json, write_json
from laminar.simulation.study.paper_figures import PAPER_FIGURES
from tests.simulation.synthetic_study import study


def small():
    return study(models=("qwen2.5-7b",), workloads=("math",), sizes=(64,))


def test_what_is_written_is_read_again_unchanged(tmp_path):
    path = tmp_path / "study.json"
    write_json(small(), path, {})
    assert read_json(path) == small()


def test_the_same_result_gives_the_same_text():
    assert to_json(small(), {}) == to_json(small(), {})


def test_keys_that_others_rely_on():
    document = json.loads(to_json(small(), {"math_over_synchronous": "why"}))
    assert sorted(document) == ["assumptions", "cases", "description", "format", "name", "paper"]
    assert document["format"] == 1
    case = document["cases"][0]
    assert {"model", "gpus", "rollout_gpus", "trainer_gpus", "tensor_parallel", "workload", "schedule"} <= set(case)
    record = case["record"]
    for key in ("trained_tokens_per_s", "gpu_seconds", "staleness", "kv_bins", "timeline", "repack", "host_events"):
        assert key in record
    assert record["staleness"] == {"0": 8192}
    paper = document["paper"]
    assert [one["key"] for one in paper] == [figure.key for figure in PAPER_FIGURES]
    assert paper[0]["ours"] == pytest.approx(2.5)
    assert paper[0]["explanation"] == "why"
    assert paper[0]["ratio"] == pytest.approx(2.5 / 2.56)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "format is None, expected 1"),
        ('{"format": 99}', "format is 99, expected 1"),
        (
            '{"format": 1, "name": "x", "description": "", "assumptions": [], "cases": [{"model": 3}]}',
            "is not a study's",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "study.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_json(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_json(tmp_path / "none.json")

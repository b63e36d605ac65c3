"""A study's file that is small enough for tests, and what its cases say when they are refused."""

from __future__ import annotations

import pytest

from laminar.errors import UserError
from laminar.simulation.study.config import load_study
from laminar.simulation.study.plan import plan_cases

TEXT = """\
name: small
models: [Qwen2.5-7B]
sizes: [16]
workload:
  lengths: {median: 100, p99: 800, maximum: 1000}
batch: {groups_per_step: 8, group_size: 4, mini_batches: 2}
steps: 4
warm_up_steps: 1
cool_down_steps: 0
"""


def study_file(folder, text=TEXT):
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def cases_of(folder, *overrides):
    return plan_cases(load_study(study_file(folder), overrides))


def refusal(folder, *overrides):
    with pytest.raises(UserError) as caught:
        cases_of(folder, *overrides)
    return str(caught.value)

"""What a study takes for granted, for its report: the models' constants with their sources, and the study's own choices.

Invariant: sources are read from the text under each constant in `hardware.py`; nothing is written down twice.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect

from laminar.simulation.models.hardware import CONSTANTS, Constants
from laminar.simulation.study import split
from laminar.simulation.study.config import LengthsConfig, SimulationConfig, WorkloadConfig
from laminar.simulation.study.plan import PlannedCase
from laminar.simulation.study.study_models import constants
from laminar.simulation.study.study_result import Assumption

UNITS = {"_s": "s", "_bandwidth": "bytes/s", "_bytes": "bytes"}
CONFIG = "this study's config"


def assumptions(config: SimulationConfig, cases: list[PlannedCase]) -> list[Assumption]:
    """All of them: the study's data first, then its hardware, then the constants of every study."""
    batch = config.batch
    trajectories = batch.groups_per_step * batch.group_size
    found = [
        *_workload(config.workload),
        Assumption(
            name="batch",
            value=f"{trajectories} = {batch.groups_per_step} groups x {batch.group_size}, {batch.mini_batches} mini-batches",
            unit="trajectories",
            source=CONFIG,
        ),
        Assumption(
            name="measured steps",
            value=f"{config.warm_up_steps + 1} to {config.steps - config.cool_down_steps} of {config.steps}",
            unit="",
            source=CONFIG,
        ),
        Assumption(name="split of the GPUs", value=str(config.split), unit="", source="docs/simulation.md"),
        Assumption(
            name="KV cache that a rollout is filled to",
            value=split.KV_CEILING,
            unit="share",
            source="rule for the trajectories that a rollout holds, docs/simulation.md",
        ),
    ]
    found += _gpu(cases)
    texts = _texts()
    own = constants(config.hardware)
    for one in dataclasses.fields(Constants):
        value = getattr(own, one.name)
        source = texts.get(one.name, "") if value == getattr(CONSTANTS, one.name) else CONFIG
        unit = next((unit for end, unit in UNITS.items() if one.name.endswith(end)), "")
        if one.name.endswith("_share"):
            unit = "share"
        found.append(Assumption(name=one.name.replace("_", " "), value=value, unit=unit, source=source))
    return found


def _workload(work: WorkloadConfig) -> list[Assumption]:
    prompts = work.prompt_tokens
    found = [
        Assumption(
            name="prompts",
            value=f"{prompts}, all alike" if isinstance(prompts, int) else _lengths(prompts),
            unit="tokens",
            source=CONFIG,
        ),
        Assumption(name="responses", value=_lengths(work.lengths), unit="tokens", source=CONFIG),
    ]
    if work.growth_per_step:
        value = f"{100 * work.growth_per_step:g} % a step, {work.growth}"
        found.append(Assumption(name="growth of responses", value=value, unit="", source=CONFIG))
    found.append(
        Assumption(
            name="variance of lengths that a group has in common",
            value=work.group_correlation,
            unit="share",
            source=CONFIG,
        )
    )
    if work.tools is not None:
        tools = work.tools
        value = (
            f"{tools.calls_min} to {tools.calls_max} a trajectory; median {tools.latency_median_s:g}, 99th percentile "
            f"{tools.latency_p99_s:g}, at most {tools.latency_limit_s:g}"
        )
        found.append(Assumption(name="tool calls", value=value, unit="s", source=CONFIG))
    return found


def _lengths(config: LengthsConfig) -> str:
    cut = "" if config.maximum is None else f", cut at {config.maximum}"
    if config.file is not None:
        return f"those of {config.file}{cut}"
    return f"log-normal, median {config.median:g}, 99th percentile {config.p99:g}{cut}"


def _gpu(cases: list[PlannedCase]) -> list[Assumption]:
    gpu = cases[0].models.gpu
    found = [
        Assumption(name="GPU", value=gpu.name, unit="", source="data sheet (docs/simulation-models.md)"),
        Assumption(name="GPU: memory", value=gpu.memory_bytes / 1e9, unit="GB", source=""),
        Assumption(name="GPU: memory bandwidth", value=gpu.memory_bandwidth / 1e9, unit="GB/s", source=""),
        Assumption(name="GPU: dense bf16 peak", value=gpu.peak_flops / 1e12, unit="TFLOP/s", source=""),
        Assumption(name="GPU: NVLink, both directions", value=gpu.nvlink_bandwidth / 1e9, unit="GB/s", source=""),
        Assumption(name="GPU: PCIe, one direction", value=gpu.host_link_bandwidth / 1e9, unit="GB/s", source=""),
    ]
    degrees = {case.models.model.name: case.models.tensor_parallel for case in cases}
    value = ", ".join(f"{name}: {degree}" for name, degree in degrees.items())
    return [*found, Assumption(name="tensor parallel degree", value=value, unit="GPUs", source=CONFIG)]


def _texts() -> dict[str, str]:
    """The text under each field of `Constants`, in one line."""
    body = ast.parse(inspect.getsource(Constants)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        is_text = (
            isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        )
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found

"""From a study's config to the models' own types: GPU, language model, constants, workload.

Invariant: a preset that does not exist, or figures that contradict each other, are refused with the key's name.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable

from laminar.errors import UserError
from laminar.simulation.models.hardware import CONSTANTS, GPUS, Constants, GpuSpec
from laminar.simulation.models.language_models import LANGUAGE_MODELS, ModelSpec
from laminar.simulation.models.lengths import FileLengths, Growth, Lengths, LogNormalLengths
from laminar.simulation.models.workload import ToolCalls, Workload
from laminar.simulation.study.config import (
    GpuFigures,
    HardwareConfig,
    LengthsConfig,
    ModelFigures,
    SimulationConfig,
    StudyModel,
    ToolsConfig,
    WorkloadConfig,
)


def gpu_spec(config: HardwareConfig) -> GpuSpec:
    """The study's GPU.

    Raises:
        UserError: no such preset.
    """
    gpu = config.gpu
    if isinstance(gpu, GpuFigures):
        return GpuSpec(
            name=gpu.name,
            memory_bytes=int(gpu.memory_gb * 1e9),
            memory_bandwidth=gpu.memory_bandwidth_gb_s * 1e9,
            peak_flops=gpu.peak_tflops * 1e12,
            nvlink_bandwidth=gpu.nvlink_gb_s * 1e9,
            host_link_bandwidth=gpu.host_link_gb_s * 1e9,
        )
    if gpu not in GPUS:
        raise UserError(_no_preset("hardware.gpu", gpu, GPUS))
    return GPUS[gpu]


def model_spec(config: StudyModel) -> ModelSpec:
    """A language model of the study.

    Raises:
        UserError: no such preset.
    """
    shape = config.shape
    if isinstance(shape, ModelFigures):
        return ModelSpec(**shape.model_dump())
    if shape not in LANGUAGE_MODELS:
        raise UserError(_no_preset("models", shape, LANGUAGE_MODELS))
    return LANGUAGE_MODELS[shape]


def constants(config: HardwareConfig) -> Constants:
    """The constants of all studies, with this one's hosts."""
    return dataclasses.replace(
        CONSTANTS,
        gpus_per_host=config.gpus_per_host,
        nics_per_host=config.nics_per_host,
        nic_bandwidth=config.nic_gbit_s * 1e9 / 8,
    )


def workload(config: WorkloadConfig, study: SimulationConfig) -> Workload:
    """What is generated.

    Raises:
        UserError: figures that contradict each other, or a file that cannot be read, is empty, or holds no lengths.
    """
    prompts = config.prompt_tokens
    return Workload(
        lengths=_lengths("workload.lengths", config.lengths),
        prompt_lengths=prompts if isinstance(prompts, int) else _lengths("workload.prompt_tokens", prompts),
        group_size=study.batch.group_size,
        groups_per_step=study.batch.groups_per_step,
        seed=study.seed,
        tools=None if config.tools is None else _tools(config.tools),
        growth=Growth(per_step=config.growth_per_step, kind=config.growth),
        group_correlation=config.group_correlation,
    )


def _tools(config: ToolsConfig) -> ToolCalls:
    return ToolCalls(
        minimum=config.calls_min,
        maximum=config.calls_max,
        latency_median_s=config.latency_median_s,
        latency_p99_s=config.latency_p99_s,
        latency_limit_s=config.latency_limit_s,
    )


def _lengths(key: str, config: LengthsConfig) -> Lengths:
    given = [name for name in ("median", "p99") if getattr(config, name) is not None]
    if config.file is not None:
        if given:
            raise UserError(
                f"{key}: file and {' and '.join(given)} are both given; the file has its own distribution: remove one of them"
            )
        return FileLengths(config.file, maximum=config.maximum)
    missing = [name for name in ("median", "p99", "maximum") if getattr(config, name) is None]
    if missing:
        raise UserError(
            f"{key}: {' and '.join(missing)} missing; expected median, p99 and maximum of a log-normal distribution, or a file "
            "of lengths"
        )
    assert config.median is not None and config.p99 is not None and config.maximum is not None
    return LogNormalLengths(median=config.median, p99=config.p99, maximum=config.maximum)


def _no_preset(key: str, name: str, presets: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(presets), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{key}: {name!r} is no preset; expected one of {', '.join(presets)}, or a section with its figures{hint}"

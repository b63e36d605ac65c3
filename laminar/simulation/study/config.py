"""The config of a study: every key that `laminar simulate CONFIG` takes, with its type, range, default and meaning.

Unknown keys are refused, as in an experiment's config. Checks that need more than one key are made where cases are planned
(`plan.py`), before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from laminar.config.load import load_section
from laminar.config.schema import BufferConfig
from laminar.config.section import Section
from laminar.config.yaml_file import FileKind
from laminar.simulation.models.hardware import CONSTANTS

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
ScheduleName = Literal["laminar", "synchronous", "one_step", "stream", "partial"]

STUDY_FILE = FileKind(
    what="a simulation config",
    folder="configs/simulation/",
    example="configs/simulation/quick.yaml",
    keys="name, models, sizes, workload",
)


class GpuFigures(Section):
    """A GPU that is no preset, as its data sheet has it."""

    name: str
    """How the reports call it."""
    memory_gb: Positive
    """Memory, in 10^9 bytes."""
    memory_bandwidth_gb_s: Positive
    """Memory bandwidth, in 10^9 bytes/s."""
    peak_tflops: Positive
    """Dense bf16 peak, in 10^12 FLOP/s (data sheets print twice that, with sparsity)."""
    nvlink_gb_s: Positive
    """NVLink, both directions together, in 10^9 bytes/s."""
    host_link_gb_s: Positive
    """PCIe to the host, one direction, in 10^9 bytes/s."""


class HardwareConfig(Section):
    """The cluster's hosts."""

    gpu: str | GpuFigures = "H800"
    """A preset (`H800`, `H100`, `H200`, `A100-80GB`), or a section with a GPU's figures."""
    gpus_per_host: Annotated[int, Field(ge=1, le=64)] = CONSTANTS.gpus_per_host
    """GPUs of a host."""
    nics_per_host: Annotated[int, Field(ge=1, le=64)] = CONSTANTS.nics_per_host
    """NICs of a host."""
    nic_gbit_s: Positive = CONSTANTS.nic_bandwidth * 8 / 1e9
    """Line rate of a NIC, one direction, in 10^9 bits/s."""


class ModelFigures(Section):
    """The shape of a dense decoder with grouped-query attention, as in its `config.json`."""

    name: str
    """How the reports call it."""
    layers: Count
    """`num_hidden_layers`."""
    hidden: Count
    """`hidden_size`."""
    query_heads: Count
    """`num_attention_heads`."""
    kv_heads: Count
    """`num_key_value_heads`."""
    head_dim: Count
    """`head_dim`, or hidden_size / num_attention_heads."""
    intermediate: Count
    """`intermediate_size`."""
    vocabulary: Count
    """`vocab_size`."""


class StudyModel(Section):
    """A language model of the study."""

    shape: str | ModelFigures
    """A preset (`Qwen2.5-7B`, `Qwen2.5-32B`, `Qwen2.5-72B`), or a section with a model's shape."""
    tensor_parallel: Annotated[int | None, Field(ge=1, le=64)] = None
    """GPUs per rollout. null: the smallest power of two with which the weights take at most a third of the engine's memory."""
    sizes: Annotated[list[Count] | None, Field(min_length=1)] = None
    """Numbers of GPUs for this model, in place of the study's `sizes`."""


class StudySchedule(Section):
    """A schedule of the study. The same one may be listed several times, with different options."""

    name: ScheduleName
    """As `schedule.name` of an experiment."""
    label: Annotated[str | None, Field(pattern=r"^\S.*$")] = None
    """Name in the reports; entries with other options than the usual ones need one to be told apart. null: the schedule's name."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["unbounded"] | None = None
    """As `schedule.max_staleness` of an experiment. null: the schedule's own."""
    outstanding_batches: Annotated[float | None, Field(ge=1)] = None
    """As `schedule.outstanding_batches` of an experiment, for `max_staleness: unbounded`. null: the default there."""
    repack: bool = False
    """Repack rollouts that hold only stragglers."""
    split: Literal["auto", "shared"] | Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """GPUs of the trainer, in place of the study's `split`."""
    weights: Literal["relays", "global"] | None = None
    """How weights reach the rollouts. null: by relays under `laminar`, by a global GPU broadcast under the others, as their systems do it."""
    max_running: Annotated[int | None, Field(ge=1)] = None
    """In place of the study's `rollout.max_running`."""


class LengthsConfig(Section):
    """A distribution of lengths in tokens: log-normal by `median` and `p99`, or the lengths in `file`."""

    median: Annotated[float | None, Field(ge=1)] = None
    """Median."""
    p99: Annotated[float | None, Field(ge=1)] = None
    """99th percentile, before the cut at `maximum`."""
    maximum: Annotated[int | None, Field(ge=1)] = None
    """Longer ones are cut here. null: the longest of the file."""
    file: str | None = None
    """Text file of lengths, one a line (or a JSON array), each as likely as the others; relative to the working directory."""


class ToolsConfig(Section):
    """Tool calls of multi-turn trajectories, spread evenly over the response; latencies are log-normal."""

    calls_min: Annotated[int, Field(ge=0)]
    """Fewest calls of a trajectory; the number is uniform."""
    calls_max: Annotated[int, Field(ge=0)]
    """Most calls of a trajectory."""
    latency_median_s: Positive
    """Median seconds of a call."""
    latency_p99_s: Positive
    """99th percentile of a call, in seconds."""
    latency_limit_s: Positive
    """A call that takes longer is given up then, in seconds."""


class WorkloadConfig(Section):
    """What is generated."""

    name: Annotated[str, Field(pattern=r"^\S.*$")] = "math"
    """Name in the reports; the paper's figures are beside workloads called `math` and `tools`."""
    prompt_tokens: Count | LengthsConfig = 200
    """Length of the prompts in tokens, the same for all, or a distribution."""
    lengths: LengthsConfig
    """Lengths of the responses."""
    growth_per_step: Annotated[float, Field(ge=0)] = 0.0
    """Responses grow by this share with every step: 0.01 is one percent."""
    growth: Literal["linear", "geometric"] = "linear"
    """Whether they grow by a share of the first step's length, or of the step before's."""
    group_correlation: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the variance of (log) length that the members of a group have in common."""
    tools: ToolsConfig | None = None
    """Tool calls within the responses. null: none."""


class BatchConfig(Section):
    """What one step trains on."""

    groups_per_step: Count = 512
    """Groups (prompts) of a step."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Trajectories of a group."""
    mini_batches: Count = 4
    """Optimizer updates of a step."""


class StudyRollout(Section):
    """How rollouts are driven."""

    max_running: Annotated[int | None, Field(ge=1)] = None
    """Trajectories that a rollout holds at once. null: an even share of what the schedule lets be under way, as far as the KV cache holds it (docs/simulation.md)."""
    delta_interval_s: Positive = 300.0
    """How often a rollout sends what its trajectories gained, in seconds. Without faults it changes nothing but the simulator's own speed: a finish is sent at once."""


class StudyRepack(Section):
    """Options of repack, for schedules with `repack: true`."""

    interval_s: Positive = 5.0
    """As `repack.interval_s` of an experiment."""
    kv_ceiling: Annotated[float, Field(gt=0, le=1)] = 0.9
    """As `repack.kv_ceiling` of an experiment."""
    batch_bound: Annotated[int | None, Field(ge=2)] = None
    """As `repack.batch_bound` of an experiment, but never more than a rollout holds at once. null: `auto`, fitted from the decode steps that the modelled rollouts report."""
    slowdown: Annotated[float, Field(gt=1)] = 2.0
    """As `repack.slowdown` of an experiment."""


class SimulationConfig(Section):
    """A study: every schedule with every model on every size."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of the study, and of its HTML page."""
    description: str = ""
    """A sentence for the report."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the workload and of everything else that is random; the same seed gives the same figures."""
    hardware: HardwareConfig = HardwareConfig()
    models: Annotated[list[str | StudyModel], Field(min_length=1)]
    """Language models: presets, or sections with options."""
    sizes: Annotated[list[Count], Field(min_length=1)]
    """Numbers of GPUs: of rollouts and trainer together."""
    schedules: Annotated[list[ScheduleName | StudySchedule] | None, Field(min_length=1)] = None
    """Schedules to compare, by name, or as sections with options. null: all five, and `laminar` with repack as well."""
    split: Literal["auto", "shared"] | Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = "auto"
    """GPUs of the trainer under every schedule but `synchronous`, which shares all: a number, a fraction, `shared` (taking turns with the rollouts on all GPUs), or `auto`: where the estimated seconds of generation and training of a step balance (docs/simulation.md)."""
    workload: WorkloadConfig
    batch: BatchConfig = BatchConfig()
    steps: Annotated[int, Field(ge=1)] = 16
    """Steps that each case runs, the unmeasured ones included."""
    warm_up_steps: Annotated[int, Field(ge=0)] = 6
    """First steps, which are not measured: the pipeline fills."""
    cool_down_steps: Annotated[int, Field(ge=0)] = 5
    """Last steps, which are not measured: under a bound of staleness S rollouts have nothing to do in the last S, whose data they have generated before."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0: none in the measured time."""
    rollout: StudyRollout = StudyRollout()
    repack: StudyRepack = StudyRepack()
    buffer: BufferConfig = BufferConfig()
    """As `buffer` of an experiment."""


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> SimulationConfig:
    """Read a study's config file, apply overrides, and validate every key on its own.

    Raises:
        UserError: the file, an override or a value is wrong; one text with every mistake.
    """
    return load_section(SimulationConfig, STUDY_FILE, path, overrides)

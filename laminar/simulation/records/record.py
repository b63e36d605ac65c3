"""What one simulated run leaves behind: `RunRecord`, plain numbers and texts that go to JSON and back.

Invariants: figures are of the measured steps alone (warm-up and cool-down excluded), per second of virtual time; the GPU
seconds of all activities add up to GPUs times measured seconds, as far as the controller's state clocks do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True, frozen=True)
class Activity:
    """Something that a GPU can be doing."""

    label: str
    kind: Literal["busy", "tail", "idle"]


# Keys of `RunRecord.gpu_seconds`, in the order in which they are shown; a state that is not here is shown under its name.
ACTIVITIES = {
    "training": Activity(label="training", kind="busy"),
    "generating": Activity(label="generating", kind="busy"),
    "publishing": Activity(label="publishing weights", kind="busy"),
    "checkpointing": Activity(label="writing a checkpoint", kind="busy"),
    "long_tail": Activity(label="generating, few trajectories left (long tail)", kind="tail"),
    "trajectories": Activity(label="trainer idle: waits for trajectories", kind="idle"),
    "trainer": Activity(label="rollout idle: waits for the trainer's step", kind="idle"),
    "batch": Activity(label="rollout idle: batch full, waits for the others", kind="idle"),
    "weights": Activity(label="rollout idle: newer weights on their way", kind="idle"),
    "pulling": Activity(label="rollout idle: loads weights", kind="idle"),
    "prompts": Activity(label="rollout idle: no prompts left", kind="idle"),
    "paused": Activity(label="paused", kind="idle"),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRecord:
    """One step, of the measured ones or not."""

    step: int
    time_s: float  # when it finished, seconds since the start of the run
    step_s: float  # seconds since the step before finished
    trained_tokens: int  # prompt and response
    staleness: dict[int, int]  # staleness -> trajectories


@dataclass(kw_only=True, slots=True, frozen=True)
class Spread:
    """A distribution in four numbers."""

    mean: float
    p50: float
    p99: float
    max: float


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightFigures:
    """How weights travelled, means over the measured steps."""

    publish_stall_s: float | None  # the trainer stands still
    broadcast_s: float | None  # from the publish until every relay has the version
    pulls: int  # by all rollouts together
    pull_s: float | None  # loading alone
    wait_s: float | None  # a rollout's time without work per pull: waiting for weights, and loading


@dataclass(kw_only=True, slots=True, frozen=True)
class RepackFigures:
    """What repacking did in the measured steps; all zero if it was off."""

    repacks: int = 0  # plans with at least one move
    moves: int = 0  # source -> target; each frees its source
    trajectories_moved: int = 0
    tokens_moved: int = 0  # prompt and response tokens to prefill again
    overhead_s: float = (
        0.0  # mean seconds of a move, from the stop at the source until the target has prefilled what came
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Span:
    """What one lane of the timeline did for a while."""

    start_s: float  # seconds since the start of the timeline
    end_s: float
    activity: str  # "generating" | "pulling" | "idle" | "training"
    policy_version: int  # served; of a training span: the version that the step makes
    running: int  # trajectories at its start; of a training span: groups


@dataclass(kw_only=True, slots=True, frozen=True)
class Lane:
    """One rollout, or the trainer."""

    name: str
    spans: list[Span]


@dataclass(kw_only=True, slots=True, frozen=True)
class RunRecord:
    """Everything that the reports need to know of one schedule on one cluster."""

    steps: list[StepRecord]
    warm_up_steps: int  # the first ones, not measured
    cool_down_steps: int  # the last ones, not measured: the data ends
    measured_s: float  # virtual seconds
    step_s: float  # mean
    trained_tokens_per_s: float  # prompt and response tokens: the paper's measure
    generated_tokens_per_s: float
    gpu_seconds: dict[str, float]  # activity (`ACTIVITIES`) -> GPUs times seconds
    trainer_idle_fraction: float
    rollout_idle_fraction: float
    staleness: dict[int, int]  # staleness -> trajectories
    mixed_version_fraction: float  # of the trajectories: tokens of more than one policy version
    kv_utilization: float  # mean over rollouts and time, 0 to 1
    kv_bin_s: float
    kv_bins: list[float]  # mean over rollouts, per bin, since the start of the run
    response_tokens: Spread
    trajectory_s: Spread  # from the first lease to the last token
    groups_dropped: int
    weights: WeightFigures
    repack: RepackFigures
    timeline: list[Lane]  # the trainer and up to 16 rollouts, over a few steps after the warm-up
    engine: dict[str, float]  # figures of the engine models, by name
    host_s: float  # CPU seconds that the simulation took
    host_events: int  # of the virtual-time loop

    @property
    def staleness_mean(self) -> float:
        """Mean over trajectories."""
        count = sum(self.staleness.values())
        return sum(value * n for value, n in self.staleness.items()) / count if count else 0.0

    @property
    def staleness_max(self) -> int:
        """Of any trajectory."""
        return max(self.staleness, default=0)

    @property
    def busy_fraction(self) -> float:
        """Of all GPU seconds: training or generating, long tails included."""
        return sum(self.share(name) for name, activity in ACTIVITIES.items() if activity.kind != "idle")

    def share(self, activity: str) -> float:
        """Of all GPU seconds, 0 to 1."""
        total = sum(self.gpu_seconds.values())
        return self.gpu_seconds.get(activity, 0.0) / total if total else 0.0

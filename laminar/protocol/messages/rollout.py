"""What the controller and a rollout say to each other: trajectories, their KV, weights, load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# ---------------------------------------------------------------- controller -> rollout


@dataclass(kw_only=True, slots=True, frozen=True)
class KvReference:
    """A stopped trajectory's KV in the shared memory of the rollout that exported it."""

    trajectory_id: str
    lease: int  # under which it was made
    exporter: str  # "rollout-1"
    name: str  # of the export, unique in the run
    policy_version: int
    tokens: int  # positions of prompt and response, from 0 on
    nbytes: int
    shards: int  # files
    address: str  # host:port of the exporter's door, for rollouts that do not share its memory; empty: there is none
    epoch: int  # of the hop on which the exporter hands it out, once


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryAssignment:
    """One trajectory leased to a rollout, to start or (with token ids) to continue."""

    trajectory_id: str
    lease: int
    policy_version: int  # the version that must serve it
    prompt_token_ids: np.ndarray  # int32 [P]
    token_ids: np.ndarray  # int32 [T]
    max_new_tokens: int
    seed: int
    kv: KvReference | None = (
        None  # of prompt and token_ids, to be imported rather than prefilled; answered by `KvTaken`
    )
    temperature: float | None = None  # None: rollout.temperature


@dataclass(kw_only=True, slots=True, frozen=True)
class Generate:
    """Trajectories to generate."""

    assignments: tuple[TrajectoryAssignment, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class AbortTrajectories:
    """Stop these; the last deltas come with finish reason "abort"."""

    trajectory_ids: tuple[str, ...]
    export_kv: bool = False  # leave their KV in shared memory; the last deltas say where


@dataclass(kw_only=True, slots=True, frozen=True)
class DropKv:
    """Remove exported KV that nobody will import, from the shared memory that this rollout shares with its exporters."""

    names: tuple[str, ...]  # of exports
    exporters: tuple[str, ...] = ()  # rollouts that do not come back: all that they exported


@dataclass(kw_only=True, slots=True, frozen=True)
class PullWeights:
    """Load weights from the store; sent only when nothing is generated. The answer is `WeightsPulled` or `PullFailed`."""

    policy_version: int
    store: (
        str  # weight store in shared memory: that of the relay on the rollout's host; empty: the weights in model.path
    )
    exact: bool  # this very version, to go on with trajectories of it; else the newest, this one at least


@dataclass(kw_only=True, slots=True, frozen=True)
class ReportLoad:
    """Say your load now, as `RolloutLoad`."""


# ---------------------------------------------------------------- rollout -> controller


@dataclass(kw_only=True, slots=True, frozen=True)
class DecodeSteps:
    """Decode steps since the last answer to `ReportLoad`, by batch size; empty where there were none."""

    running: np.ndarray  # int32 [S]: trajectories in the batch, ascending
    seconds: np.ndarray  # float32 [S]: of a step, median
    kv_utilization: np.ndarray  # float32 [S]: mean, 0 to 1


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutJoined:
    """What a rollout holds that another controller gave it; sent before `Ready`, when the controller is a new one.

    After `Ready` it sends all tokens of these K trajectories once more, from the beginning of their leases.
    """

    policy_version: int  # that its engine serves; -1: none
    trajectory_ids: tuple[str, ...]  # K: in progress, or ended of late
    leases: tuple[int, ...]  # K


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutLoad:
    """Load figures of one replica."""

    running: int
    waiting: int
    kv_utilization: float  # 0 to 1
    prefill_s_per_token: float = 0.0  # seconds of prefill per token of context, as measured lately; 0: not yet
    kv_move_s_per_token: float = 0.0  # seconds to export and import the KV of a token, likewise
    steps: DecodeSteps | None = None  # in answers to `ReportLoad`, and in no other


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryDeltas:
    """What K trajectories gained since the last message, as one batch."""

    policy_version: int  # that the engine served
    trajectory_ids: tuple[str, ...]  # K
    leases: tuple[int, ...]  # K
    starts: np.ndarray  # int32 [K]: tokens of the response before these; tells a repeated delta from a new one
    token_counts: np.ndarray  # int32 [K]
    token_ids: np.ndarray  # int32 [sum of token_counts]
    logprobs: np.ndarray  # float32 [sum of token_counts]
    finish_reasons: tuple[str | None, ...]  # K
    load: RolloutLoad
    exported_kv: tuple[KvReference, ...] = ()  # of those among them that were stopped with `export_kv`


@dataclass(kw_only=True, slots=True, frozen=True)
class KvTaken:
    """The rollout is through with the KV that came with an assignment."""

    trajectory_id: str
    lease: int  # of the assignment
    name: str
    tokens: int  # positions that were filled from it; 0 where there is an error, or where they were at hand already
    nbytes: int
    seconds: float
    error: str  # why it was prefilled after all; empty if it was not


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsPulled:
    """The rollout serves this version now."""

    policy_version: int
    seconds: float
    nbytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class PullFailed:
    """The store does not hold the version that was asked for; the rollout still serves what it served."""

    policy_version: int  # that was asked for
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class Leaving:
    """The rollout must be gone in so many seconds (SIGTERM, a spot instance's notice); until then it serves."""

    seconds: float

"""Every message between the controller and its workers. Nothing else crosses a process boundary.

Messages are frozen dataclasses; arrays travel as raw frames beside the msgpack header (`codec.py`). "->" in a section's
title reads "sent by, to".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

WorkerKind = Literal["rollout", "relay", "trainer", "environment"]

# ---------------------------------------------------------------- any worker -> controller


@dataclass(kw_only=True, slots=True, frozen=True)
class Hello:
    """First message of a worker: who it is. The controller answers with `Welcome` or `Shutdown`."""

    kind: WorkerKind
    index: int  # replica index, relay index, trainer rank, environment worker index
    pid: int
    host: str
    version: str  # laminar's version; must equal the controller's


@dataclass(kw_only=True, slots=True, frozen=True)
class Progress:
    """What a worker is doing while it warms up, as one line for a person to read."""

    text: str


@dataclass(kw_only=True, slots=True, frozen=True)
class Ready:
    """The worker can take work."""

    detail: str  # one line for a person: the engine taken, the device, the model's size


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerFailed:
    """The worker cannot go on and is about to exit."""

    error: str  # one message for a person
    user_error: bool  # the user's input or machine is at fault


# ---------------------------------------------------------------- both directions


@dataclass(kw_only=True, slots=True, frozen=True)
class Heartbeat:
    """Still there."""


# ---------------------------------------------------------------- controller -> any worker


@dataclass(kw_only=True, slots=True, frozen=True)
class Welcome:
    """The worker belongs to the run now; all that it needs to know comes with this."""

    run_id: str
    run_dir: str
    config: str  # the resolved ExperimentConfig as JSON
    store: str  # weight store in shared memory that this worker writes (trainer: the master relay's; relay: its own)
    hop_key: bytes  # secret of the run; whoever opens a TCP hop shows that it knows it
    version_bytes: int  # of one weight version, 0 if it is not known yet


@dataclass(kw_only=True, slots=True, frozen=True)
class Shutdown:
    """End now, cleanly."""

    reason: str


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


# ---------------------------------------------------------------- controller -> relay, and back (or the trainer's rank 0)


@dataclass(kw_only=True, slots=True, frozen=True)
class RelayJoined:
    """What a relay has and how it can be reached; sent before `Ready`."""

    versions: tuple[int, ...]  # that its store holds, oldest first: it may have lived before
    address: str  # host:port where it takes TCP hops
    world: str  # names the mpirun world that it belongs to; empty outside of one
    world_rank: int  # in that world; -1 outside of one
    library: str  # MPI library and version; empty outside of a world


@dataclass(kw_only=True, slots=True, frozen=True)
class HopOrder:
    """One neighbour in the chain, and the way to it."""

    peer: str  # "relay-2", "trainer-0"
    epoch: int  # of this hop: unique in the run, the same at both ends
    world_rank: int  # the neighbour's, when the hop goes by MPI; -1: by TCP
    address: str  # where the downstream neighbour takes TCP hops; empty at its own end


@dataclass(kw_only=True, slots=True, frozen=True)
class Carry:
    """These are your neighbours for this version.

    A later order for the same version replaces the neighbours: a hop whose epoch stays goes on, others are given up. An
    order for another version gives the whole transfer up.
    """

    policy_version: int
    order: int  # grows with every order of the run: one that comes late is not obeyed
    upstream: HopOrder | None  # None: it holds the version
    downstream: HopOrder | None  # None: the end of the chain
    chunk_bytes: int
    encoding: Literal["full", "delta"]
    limit_s: float  # from now on


@dataclass(kw_only=True, slots=True, frozen=True)
class BroadcastEnded:
    """Every relay has the version, or was given up: time to let old versions go, and to have memory ready for the next.

    Not earlier: zeroing memory takes the bandwidth that the chunks need.
    """

    policy_version: int


@dataclass(kw_only=True, slots=True, frozen=True)
class CarryProgress:
    """How far a transfer is; sent a few times a second as long as it lasts, so that silence tells a stalled relay."""

    policy_version: int
    order: int
    received: int  # chunks that are here and checked
    sent: int  # chunks handed to the downstream neighbour
    chunks: int  # of the version; 0 while unknown


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsStored:
    """The relay holds the complete, checked version."""

    policy_version: int
    seconds: float  # from its first order for the version to its commit; 0 where it was there already
    nbytes: int  # size of the version
    received_bytes: int  # that came over the wire for it
    chunks: int
    damaged: int  # chunks that came damaged and were asked for again
    latency_s: float  # of the hop: half a round trip of a small frame; 0 where nothing was received
    bytes_per_s: float  # of the hop while chunks kept coming; 0 where nothing was received


@dataclass(kw_only=True, slots=True, frozen=True)
class HopFailed:
    """A neighbour, or the way to it, is lost; the relay keeps what it has and waits for another order."""

    policy_version: int
    epoch: int
    peer: str
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class CarryFailed:
    """The relay cannot do its part (no memory, it does not hold the version, its limit has passed) and has given it up."""

    policy_version: int
    order: int
    error: str


# ---------------------------------------------------------------- controller -> trainer, and back
#
# Orders are numbered, and the numbers grow over all controllers of a run. A rank obeys each once; one that it is given
# again (by a controller that took another's place) it answers again.


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerJoined:
    """Where a rank stands, when the controller is a new one; sent before `Ready`."""

    order: int  # newest that it was given; 0: none


@dataclass(kw_only=True, slots=True, frozen=True)
class PublishWeights:
    """Write the current weights into the master relay's store as this version (at the start of a run)."""

    order: int
    policy_version: int


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainStep:
    """Optimizer updates on N trajectories, and the publish if they end the step. Every rank gets all and takes its share.

    Trajectories of a group stand together; mini-batches are cut at group borders. A step comes as one message, or in
    parts of one mini-batch each when its schedule trains what has finished first.
    """

    order: int
    step: int
    part: int  # 0 for the first
    mini_batches: int  # optimizer updates to make of these trajectories
    publish_version: int | None  # None: more parts of the step follow
    group_ids: np.ndarray  # int64 [N]
    rewards: np.ndarray  # float32 [N]
    prompt_lengths: np.ndarray  # int32 [N]
    response_lengths: np.ndarray  # int32 [N]
    token_ids: np.ndarray  # int32 [sum of prompt and response lengths]: prompt, response, prompt, response, ...
    loss_mask: np.ndarray  # uint8 [sum of response lengths]: 0 where the policy did not write the token
    engine_logprobs: np.ndarray  # float32 [sum of response lengths]
    staleness: np.ndarray  # int32 [N]: version of the trainer less that of each trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTrained:
    """A rank finished the optimizer updates of a step or a part; metrics are already averaged over ranks."""

    step: int
    part: int
    seconds: float
    metrics: dict[str, float]


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsPublished:
    """Rank 0 has put a version into the master relay's store, and goes on."""

    policy_version: int
    publish_stall_s: float  # time for which training stood still
    nbytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class SaveCheckpoint:
    """Write trainer state and a Hugging Face export into the folder; complete only with its marker."""

    order: int
    step: int
    policy_version: int
    path: str
    state: str  # JSON that the controller wants back with this checkpoint


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointSaved:
    """Outcome of a checkpoint; `error` is empty when it is complete and durable."""

    step: int
    path: str
    seconds: float
    nbytes: int
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadCheckpoint:
    """Go back to this complete checkpoint: weights, optimizer, random state."""

    order: int
    step: int
    path: str


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointLoaded:
    """The rank stands where the checkpoint was written."""

    step: int
    seconds: float


# ---------------------------------------------------------------- controller -> environment, and back


@dataclass(kw_only=True, slots=True, frozen=True)
class FetchPrompts:
    """Prompts at these positions of the data order; the same question always has the same answer."""

    start: int
    count: int
    evaluation: bool = False  # of evaluation.source


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptRecord:
    """One tokenized prompt."""

    prompt_id: int
    source: str
    text: str
    token_ids: np.ndarray  # int32 [P]
    answer: str
    metadata: str  # JSON


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptsFetched:
    """Answer to `FetchPrompts`; fewer than asked only when the data ends there."""

    start: int
    prompts: tuple[PromptRecord, ...]
    exhausted: bool
    evaluation: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class StepEnvironment:
    """The policy has ended a turn: let the environment answer it.

    An environment worker that has not seen the turns before, or was lost since, goes through them first.
    """

    trajectory_id: str
    lease: int  # under which the turn was generated; names the call
    source: str
    prompt_text: str
    answer: str
    metadata: str
    token_ids: np.ndarray  # int32 [T], the response so far, observations included
    turn_starts: np.ndarray  # int32 [K]: first token of each turn; the last is the one to answer
    turn_ends: np.ndarray  # int32 [K]: behind its last token
    evaluation: bool = False  # of a held-out prompt


@dataclass(kw_only=True, slots=True, frozen=True)
class EnvironmentStepped:
    """The environment's answer to a turn, or why there is none."""

    trajectory_id: str
    lease: int
    token_ids: np.ndarray  # int32 [D], the observation; empty where `done`
    reward: float
    done: bool
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoreTrajectory:
    """A finished trajectory to score."""

    trajectory_id: str
    source: str
    prompt_text: str
    answer: str
    metadata: str
    token_ids: np.ndarray  # int32 [T], the response
    turn_start: int  # of its last turn, which is what is scored
    turn_end: int
    evaluation: bool = False  # a held-out prompt's, scored by the evaluation's reward


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryScored:
    """Its reward, or why there is none."""

    trajectory_id: str
    reward: float  # NaN where error is set
    response_text: str
    error: str
    parts: dict[str, float] = field(default_factory=dict)  # each part of the reward before weighting, by its name


MESSAGE_TYPES: tuple[type, ...] = (
    Hello,
    Progress,
    Ready,
    WorkerFailed,
    Heartbeat,
    Welcome,
    Shutdown,
    Generate,
    AbortTrajectories,
    DropKv,
    PullWeights,
    ReportLoad,
    RolloutJoined,
    RolloutLoad,
    TrajectoryDeltas,
    KvTaken,
    WeightsPulled,
    PullFailed,
    Leaving,
    RelayJoined,
    Carry,
    BroadcastEnded,
    CarryProgress,
    WeightsStored,
    HopFailed,
    CarryFailed,
    TrainerJoined,
    PublishWeights,
    TrainStep,
    StepTrained,
    WeightsPublished,
    SaveCheckpoint,
    CheckpointSaved,
    LoadCheckpoint,
    CheckpointLoaded,
    FetchPrompts,
    PromptsFetched,
    StepEnvironment,
    ScoreTrajectory,
    EnvironmentStepped,
    TrajectoryScored,
)

"""The controller's event bus: every change is a typed event; metrics, terminal, REPL and run directory subscribe.

Subscribers are plain functions called in order, in the controller's loop, and must not block. What they raise stops the
run: an event that is not recorded is a bug, not something to pass over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from laminar.evaluation_result import EvaluatedResponse, EvaluationResult
from laminar.trajectory import Group, Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class ProcessStarted:
    """The launcher started a process."""

    name: str
    pid: int
    command: str


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerJoined:
    """A worker said hello and was let in."""

    worker: str
    host: str
    pid: int


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerProgress:
    """What a warming-up worker is doing."""

    worker: str
    text: str


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerReady:
    """A worker can take work."""

    worker: str
    detail: str


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerReplaced:
    """A worker was lost and another was started in its place."""

    worker: str
    reason: str


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutLost:
    """A rollout is gone; its trajectories wait for another of their version."""

    rollout: str
    reason: str
    trajectories: int


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryOrphaned:
    """Its rollout is gone; it waits to go on elsewhere."""

    trajectory: Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryMoved:
    """A trajectory in progress goes on: on another rollout, or on its own (with newer weights under the schedule `partial`, or after
    the environment's answer)."""

    trajectory: Trajectory
    rollout: str


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryRestarted:
    """Its version is gone for good, so it is generated anew."""

    trajectory: Trajectory
    lost_tokens: int


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutsRepacked:
    """All trajectories of the source were moved to the target, so that the source can take new weights."""

    source: str
    target: str
    trajectories: int
    tokens: int  # prompt and response tokens; those whose KV does not come along are prefilled again
    seconds: float  # from the stop at the source to the new lease
    costs_s: float | None = (
        None  # of the target's time, to prefill or take in what was moved, as planned; None: not known
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class RepackSettled:
    """All trajectories of a move have ended, so the source would have been held until about now: what the move has come to."""

    source: str
    target: str
    trajectories: int
    tokens: int  # prompt and response tokens that were moved
    kv_tokens: int  # of them, those whose KV came along; the others were prefilled again
    kv_bytes: int  # of that KV
    planned_frees_s: float | None  # what the planner expected to free, in seconds of a rollout; None: it could not tell
    planned_costs_s: float | None  # likewise, of the target's time
    freed_s: float  # from the move until the last of the trajectories ended
    pause_s_mean: float  # of a trajectory, from the stop at the source to the lease at the target
    pause_s_max: float
    gained_tokens: int  # that the freed rollout generated in that time


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutHealthChanged:
    """What `controller/fleet_health.py` says of a rollout now."""

    rollout: str
    health: str
    reason: str


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoriesRecovered:
    """All trajectories of a rollout that was lost or left have gone on elsewhere, or ended."""

    rollout: str  # that had them
    trajectories: int
    regenerated: int  # of them, started anew: their version was gone
    seconds: float  # since it was lost, or since the last of them was stopped


@dataclass(kw_only=True, slots=True, frozen=True)
class KvMoved:
    """A rollout goes on with a trajectory whose KV came with it; or has prefilled it, because of the error."""

    rollout: str
    trajectory_id: str
    tokens: int  # positions that were not prefilled
    nbytes: int
    seconds: float  # of the import
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerRestarted:
    """The trainer stands at the step of its newest checkpoint again."""

    step: int
    lost_steps: int
    reason: str


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupsReturned:
    """The trainer lost the steps that consumed these groups; they are in the experience buffer again."""

    groups: list[Group]


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptRejected:
    """A prompt that cannot be used."""

    prompt_id: int
    source: str
    reason: str


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryStarted:
    """A trajectory was leased to a rollout for the first time."""

    trajectory: Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class TokensAppended:
    """A batch of deltas of one rollout was taken in."""

    rollout: str
    tokens: int
    late_tokens: int  # dropped: their lease was old
    kv_utilization: float


@dataclass(kw_only=True, slots=True, frozen=True)
class TurnEnded:
    """The policy has ended a turn; the environment is asked for its answer."""

    trajectory: Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class TurnAnswered:
    """The environment has answered a turn, which is the last of `trajectory.turns` now."""

    trajectory: Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryFailed:
    """The environment failed on it: it will have no reward."""

    trajectory: Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryFinished:
    """All tokens are there."""

    trajectory: Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryScored:
    """It has a reward."""

    trajectory: Trajectory
    response_text: str


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupCompleted:
    """All members are scored; the group is in the experience buffer."""

    group: Group


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupDropped:
    """The group will not be trained."""

    group: Group
    reason: str
    resampled: bool = False  # by dynamic sampling: it would teach nothing, and another is generated in its place


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationDue:
    """Held-out prompts are to be generated with this version or a newer one, as soon as there is room."""

    least_version: int


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationStarted:
    """The first held-out prompts are about to be generated, with this version."""

    evaluation: int
    policy_version: int
    step: int  # whose weights these are
    trajectories: int


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationStartedOver:
    """No rollout had the evaluation's version any more: all is generated anew, with a newer one."""

    evaluation: int
    goes_on_as: int
    policy_version: int
    responses_lost: int  # that had been scored
    scores_pending: int  # of others that had been generated


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationResponses:
    """All responses of an evaluation; comes before `EvaluationFinished`."""

    responses: tuple[EvaluatedResponse, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationFinished:
    """All its responses are scored."""

    result: EvaluationResult


@dataclass(kw_only=True, slots=True, frozen=True)
class StepStarted:
    """The trainer was given a batch."""

    step: int
    groups: int


@dataclass(kw_only=True, slots=True, frozen=True)
class StepFinished:
    """The trainer has updated the actor and published; the batch is consumed."""

    step: int
    policy_version: int
    groups: list[Group]
    train_s: float
    trainer_metrics: dict[str, float]


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsPublished:
    """A version is in the master relay's store."""

    policy_version: int
    publish_stall_s: float
    nbytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsBroadcast:
    """A broadcast is over; `error` says which relays it has not reached, and why."""

    policy_version: int
    seconds: float
    nbytes: int  # size of the version
    received_bytes: int  # that travelled over one hop for it
    relays: int  # that got it
    damaged: int  # chunks that came damaged and were asked for again
    repairs: int  # times that the chain was mended under way
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsPulled:
    """A rollout serves this version now."""

    rollout: str
    policy_version: int
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointFinished:
    """A checkpoint is complete and durable; or it failed and `error` says why."""

    step: int
    path: str
    seconds: float
    nbytes: int
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class MetricsReported:
    """The line of `metrics.jsonl` for a step."""

    line: dict[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class Notice:
    """Something a person should read."""

    level: str  # "info" | "warning"
    text: str


class EventBus:
    """Delivers events to subscribers, in the order of subscription."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[tuple[type, ...], Callable[[Any], None]]] = []
        self._by_type: dict[type, tuple[Callable[[Any], None], ...]] = {}  # of those above, for types seen so far

    def subscribe(self, subscriber: Callable[[Any], None], *kinds: type) -> None:
        """Call `subscriber` with every event of these kinds (all events if none is named)."""
        self._subscribers.append((kinds, subscriber))
        self._by_type.clear()

    def emit(self, event: object) -> None:
        """Deliver an event now."""
        kind = type(event)
        subscribers = self._by_type.get(kind)
        if subscribers is None:
            subscribers = tuple(s for kinds, s in self._subscribers if not kinds or issubclass(kind, kinds))
            self._by_type[kind] = subscribers
        for subscriber in subscribers:
            subscriber(event)

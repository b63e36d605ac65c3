"""Fills a `RunRecord` from the controller's events, for a few microseconds per trajectory.

Invariant: nothing is asked of the controller; what is not an event (the trainer's busy time, the engines' own figures)
is handed in by whoever runs the simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from laminar.observability.events import (
    EventBus,
    GroupDropped,
    MetricsReported,
    RolloutsRepacked,
    StepFinished,
    StepStarted,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryMoved,
    TrajectoryOrphaned,
    TrajectoryStarted,
    TurnEnded,
    WeightsBroadcast,
    WeightsPublished,
    WeightsPulled,
)
from laminar.observability.states import ROLLOUT_BUSY, TRAINER_BUSY
from laminar.simulation.records.binned_mean import BinnedMean
from laminar.simulation.records.gpu_seconds import RecordedCluster, gpu_seconds
from laminar.simulation.records.record import Lane, RepackFigures, RunRecord, Spread, StepRecord, WeightFigures
from laminar.simulation.records.rollout_activity import ActivitySeconds, RolloutActivity
from laminar.trajectory import Trajectory


@dataclass(kw_only=True, slots=True)
class _Measured:
    """Sums over the measured steps."""

    seconds: float = 0.0
    trained_tokens: int = 0
    generated_tokens: float = 0.0
    trainer_s: dict[str, float] = field(default_factory=dict)
    rollout_s: dict[str, float] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    mixed: int = 0
    dropped: int = 0
    stalls: list[float] = field(default_factory=list)
    broadcasts: list[float] = field(default_factory=list)
    pulls: list[float] = field(default_factory=list)
    moves: list[RolloutsRepacked] = field(default_factory=list)
    repack_starts: set[float] = field(default_factory=set)  # moves of one plan start together
    kv_integral: float = 0.0  # KV utilization times seconds, mean over rollouts
    kv_s: float = 0.0
    activity: ActivitySeconds = field(default_factory=ActivitySeconds)

    def repack_figures(self) -> RepackFigures:
        return RepackFigures(
            repacks=len(self.repack_starts),
            moves=len(self.moves),
            trajectories_moved=sum(move.trajectories for move in self.moves),
            tokens_moved=sum(move.tokens for move in self.moves),
            overhead_s=_mean([move.seconds + (move.costs_s or 0.0) for move in self.moves]) or 0.0,
        )


class RunRecorder:
    """Subscribes to the controller's bus before the run starts; `record` is called when it has ended."""

    def __init__(
        self,
        events: EventBus,
        now: Callable[[], float],
        cluster: RecordedCluster,
        *,
        trainer_busy_s: Callable[[], float],
        timeline_steps: int = 3,
        timeline_rollouts: int = 16,
    ) -> None:
        """Follow a run from its start.

        Args:
            events: the controller's bus.
            now: the loop's clock, in seconds.
            cluster: what is simulated.
            trainer_busy_s: seconds that the trainer has been busy so far (`states.TRAINER_BUSY`); called during the run.
            timeline_steps: measured steps that the timeline covers.
            timeline_rollouts: rollouts that it shows, evenly spread.
        """
        self._now = now
        self._cluster = cluster
        self._last_measured = cluster.steps - cluster.cool_down_steps
        self._timeline_steps = timeline_steps
        self._started = self._last_step_at = now()
        self._steps: list[StepRecord] = []
        self._step = 0  # finished
        self._sums = _Measured()
        self._timeline: list[Lane] = []
        self._kv = BinnedMean(now())
        self._per_rollout = 1.0 / len(cluster.rollouts)
        self._kv_of: dict[str, float] = dict.fromkeys(cluster.rollouts, 0.0)
        names = cluster.rollouts
        count = min(timeline_rollouts, len(names))
        lanes = [names[k * len(names) // count] for k in range(count)]
        self._activity = RolloutActivity(now=now, rollouts=names, timeline=lanes, trainer_busy_s=trainer_busy_s)
        if cluster.warm_up_steps == 0:
            self._activity.start_timeline()
        events.subscribe(self._on_leased, TrajectoryStarted, TrajectoryMoved)
        events.subscribe(self._on_released, TrajectoryFinished, TrajectoryOrphaned, TurnEnded)
        events.subscribe(self._on_repacked, RolloutsRepacked)
        events.subscribe(self._on_tokens, TokensAppended)
        events.subscribe(self._on_pulled, WeightsPulled)
        events.subscribe(self._on_published, WeightsPublished)
        events.subscribe(self._on_broadcast, WeightsBroadcast)
        events.subscribe(self._on_dropped, GroupDropped)
        events.subscribe(self._on_step_started, StepStarted)
        events.subscribe(self._on_step, StepFinished)
        events.subscribe(self._on_metrics, MetricsReported)

    @property
    def measuring(self) -> bool:
        """Whether what happens now belongs to a measured step."""
        return self._cluster.warm_up_steps <= self._step < self._last_measured

    def record(
        self, *, engine: Mapping[str, float], kv_utilization: float | None, host_s: float, host_events: int
    ) -> RunRecord:
        """The finished record.

        Args:
            engine: further figures of the engine models, by name.
            kv_utilization: exact mean over rollouts and measured time, if the engine models kept it; otherwise it
                follows from the load figures that came with the deltas.
            host_s: CPU seconds that the simulation took.
            host_events: events that the virtual-time loop has handled.

        Raises:
            RuntimeError: no measured step was finished.
        """
        sums = self._sums
        if not sums.seconds or not sums.lengths:
            raise RuntimeError(
                f"{self._step} steps were finished, none of them measured: the first {self._cluster.warm_up_steps} are "
                f"warm-up, those after {self._last_measured} cool-down"
            )
        measured = sum(self._cluster.warm_up_steps < step.step <= self._last_measured for step in self._steps)
        waiting_s = sums.rollout_s.get("weights", 0.0) + sums.rollout_s.get("pulling", 0.0)
        kv_utilization = sums.kv_integral / sums.kv_s if kv_utilization is None else kv_utilization
        return RunRecord(
            steps=self._steps,
            warm_up_steps=self._cluster.warm_up_steps,
            cool_down_steps=self._cluster.cool_down_steps,
            measured_s=sums.seconds,
            step_s=sums.seconds / measured,
            trained_tokens_per_s=sums.trained_tokens / sums.seconds,
            generated_tokens_per_s=sums.generated_tokens / sums.seconds,
            gpu_seconds=gpu_seconds(self._cluster, sums.trainer_s, sums.rollout_s, sums.activity),
            trainer_idle_fraction=_idle(sums.trainer_s, TRAINER_BUSY),
            rollout_idle_fraction=_idle(sums.rollout_s, ROLLOUT_BUSY),
            staleness=dict(sorted(sums.staleness.items())),
            mixed_version_fraction=sums.mixed / len(sums.lengths),
            kv_utilization=kv_utilization,
            kv_bin_s=self._kv.width,
            kv_bins=self._kv.means(),
            response_tokens=spread(sums.lengths),
            trajectory_s=spread(sums.latencies),
            groups_dropped=sums.dropped,
            weights=WeightFigures(
                publish_stall_s=_mean(sums.stalls),
                broadcast_s=_mean(sums.broadcasts),
                pulls=len(sums.pulls),
                pull_s=_mean(sums.pulls),
                wait_s=waiting_s / len(sums.pulls) if sums.pulls else None,
            ),
            repack=sums.repack_figures(),
            timeline=self._timeline or self._activity.end_timeline(),
            engine=dict(engine),
            host_s=host_s,
            host_events=host_events,
        )

    def _on_leased(self, event: TrajectoryStarted | TrajectoryMoved) -> None:
        trajectory = event.trajectory
        self._activity.held(trajectory.trajectory_id, trajectory.rollout or "")

    def _on_released(self, event: TrajectoryFinished | TrajectoryOrphaned | TurnEnded) -> None:
        self._activity.released(event.trajectory.trajectory_id)

    def _on_repacked(self, event: RolloutsRepacked) -> None:
        if self.measuring:
            self._sums.moves.append(event)
            self._sums.repack_starts.add(round(self._now() - event.seconds, 6))

    def _on_tokens(self, event: TokensAppended) -> None:
        rollout, after = event.rollout, event.kv_utilization
        before = self._kv_of.get(rollout)
        if before is not None and before != after:
            self._kv_of[rollout] = after
            self._kv.change(self._now(), (after - before) * self._per_rollout)

    def _on_pulled(self, event: WeightsPulled) -> None:
        self._activity.pulled(event.rollout, event.policy_version, event.seconds)
        if self.measuring:
            self._sums.pulls.append(event.seconds)

    def _on_published(self, event: WeightsPublished) -> None:
        self._activity.published(event.policy_version)
        if self.measuring:
            self._sums.stalls.append(event.publish_stall_s)

    def _on_broadcast(self, event: WeightsBroadcast) -> None:
        if self.measuring and not event.error:
            self._sums.broadcasts.append(event.seconds)

    def _on_dropped(self, event: GroupDropped) -> None:
        for trajectory in event.group.trajectories:
            self._activity.released(trajectory.trajectory_id)
        if self.measuring:
            self._sums.dropped += 1

    def _on_step_started(self, event: StepStarted) -> None:
        self._activity.step_started(event.groups, event.step)

    def _on_step(self, event: StepFinished) -> None:
        now = self._now()
        trajectories = [trajectory for group in event.groups for trajectory in group.trajectories]
        lengths = [trajectory.num_tokens for trajectory in trajectories]
        prompts = sum(len(group.trajectories) * len(group.prompt.token_ids) for group in event.groups)
        newest = event.policy_version - 1
        step = StepRecord(
            step=event.step,
            time_s=round(now - self._started, 3),
            step_s=round(now - self._last_step_at, 3),
            trained_tokens=sum(lengths) + prompts,
            staleness=dict(sorted(Counter([newest - (one.policy_version or 0) for one in trajectories]).items())),
        )
        self._steps.append(step)
        self._last_step_at = now
        self._activity.step_finished(event.policy_version)
        self._end_of_step(step, trajectories, lengths, now)
        self._step = event.step
        if event.step == self._cluster.warm_up_steps:
            self._activity.start_timeline()
        elif event.step == self._cluster.warm_up_steps + self._timeline_steps:
            self._timeline = self._activity.end_timeline()

    def _end_of_step(self, step: StepRecord, trajectories: list[Trajectory], lengths: list[int], now: float) -> None:
        self._activity.flush()
        kv_integral, kv_s = self._kv.take(now)
        activity, self._activity.seconds = self._activity.seconds, ActivitySeconds()
        if not self.measuring:
            return
        sums = self._sums
        sums.trained_tokens += step.trained_tokens
        sums.staleness.update(step.staleness)
        sums.lengths += lengths
        sums.latencies += [
            one.finished_at - one.started_at
            for one in trajectories
            if one.finished_at is not None and one.started_at is not None
        ]
        sums.mixed += sum(len(one.versions) > 1 for one in trajectories)
        sums.kv_integral += kv_integral
        sums.kv_s += kv_s
        sums.activity.long_tail += activity.long_tail
        sums.activity.idle_while_training += activity.idle_while_training

    def _on_metrics(self, event: MetricsReported) -> None:
        line = event.line
        if self._cluster.warm_up_steps < line["step"] <= self._last_measured:
            self._sums.seconds += line["step_s"]
            self._sums.generated_tokens += line["generated_tokens_per_s"] * line["step_s"]
            _add(self._sums.trainer_s, line["trainer_seconds"])
            _add(self._sums.rollout_s, line["rollout_seconds"])


def spread(values: Sequence[float]) -> Spread:
    """Mean and quantiles; zeros of nothing."""
    if not values:
        return Spread(mean=0.0, p50=0.0, p99=0.0, max=0.0)
    p50, p99 = np.quantile(values, (0.5, 0.99))
    return Spread(mean=float(np.mean(values)), p50=float(p50), p99=float(p99), max=float(max(values)))


def _add(totals: dict[str, float], seconds: Mapping[str, float]) -> None:
    for state, value in seconds.items():
        totals[state] = totals.get(state, 0.0) + value


def _idle(seconds: Mapping[str, float], busy: tuple[str, ...]) -> float:
    total = sum(seconds.values())
    return 1.0 - sum(seconds.get(state, 0.0) for state in busy) / total if total > 0 else 0.0


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None

"""How many trajectories each rollout has, followed from events: long tails, why idle rollouts wait, and the timeline.

Invariant: every second of every rollout is counted once, as idle, in its long tail, or neither; most events only change
a counter, and a rollout is looked at again when its count leaves a band around the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from laminar.simulation.records.record import Lane, Span

TAIL_FRACTION = 0.25  # of the most trajectories that a rollout ever had: with fewer it is in its long tail
BAND = 1.5  # a span of the timeline ends when the number of trajectories has changed by this factor


@dataclass(kw_only=True, slots=True)
class _Track:
    name: str
    since: float  # last looked at
    trained_at_since: float  # seconds that the trainer was busy until then
    span_start: float
    running: int = 0
    seen_running: int = 0  # when last looked at
    low: float = 0.0  # fewer or more trajectories than these: look at it
    high: float = 0.0
    peak: int = 0
    policy_version: int = -1
    spans: list[Span] | None = None


@dataclass(kw_only=True, slots=True)
class ActivitySeconds:
    """Rollout-seconds, summed over all rollouts."""

    long_tail: float = 0.0  # generating with less than `TAIL_FRACTION` of the peak
    idle_while_training: float = 0.0  # idle without newer weights to wait for, while the trainer makes a step


@dataclass(kw_only=True, slots=True)
class RolloutActivity:
    """Told where every trajectory is; `flush` brings `seconds` up to date."""

    now: Callable[[], float]
    rollouts: Sequence[str]
    timeline: Sequence[str]  # of these, the ones that get a lane
    trainer_busy_s: Callable[[], float]  # seconds that the trainer has been busy until now
    seconds: ActivitySeconds = field(default_factory=ActivitySeconds)
    _tracks: dict[str, _Track] = field(default_factory=dict)
    _held_by: dict[str, _Track] = field(default_factory=dict)  # by trajectory id
    _part: tuple[float, float, int] | None = None  # when the trainer was given groups, seconds busy until then, groups
    _published: dict[int, float] = field(default_factory=dict)  # version -> seconds of training until then
    _timeline_start: float | None = None
    _trainer_spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        """All rollouts begin idle, now."""
        now = self.now()
        for name in self.rollouts:
            self._tracks[name] = _Track(name=name, since=now, trained_at_since=0.0, span_start=now)

    def held(self, trajectory_id: str, rollout: str) -> None:
        """A trajectory in progress is on this rollout from now on."""
        track = self._tracks.get(rollout)
        if track is None:  # it has joined the run
            now = self.now()
            track = self._tracks[rollout] = _Track(
                name=rollout, since=now, trained_at_since=self.trainer_busy_s(), span_start=now
            )
        before = self._held_by.get(trajectory_id)
        if before is track:
            return
        if before is not None:
            self.released(trajectory_id)
        self._held_by[trajectory_id] = track
        running = track.running = track.running + 1
        if running > track.high:
            self._look(track, self.now())

    def released(self, trajectory_id: str) -> None:
        """It is on no rollout any more: it has ended, or its rollout was lost."""
        track = self._held_by.pop(trajectory_id, None)
        if track is not None:
            running = track.running = track.running - 1
            if running < track.low:
                self._look(track, self.now())

    def pulled(self, rollout: str, policy_version: int, seconds: float) -> None:
        """It has spent the last `seconds` on loading this version."""
        track = self._tracks.get(rollout)
        if track is None:
            return
        now = self.now()
        self._account(track, now)
        began = max(track.span_start, now - seconds)
        self._end_span(track, began, "generating" if track.seen_running else "idle", track.seen_running)
        track.policy_version = policy_version
        self._end_span(track, now, "pulling", track.running)

    def published(self, policy_version: int) -> None:
        """The trainer has handed over a version: rollouts that are idle from now on wait for weights."""
        self._published[policy_version] = self.trainer_busy_s()

    def step_started(self, groups: int, policy_version: int) -> None:
        """The trainer has been given groups: those of a whole step, or of a part of it."""
        self.step_finished(policy_version)
        self._part = (self.now(), self.trainer_busy_s(), groups)

    def step_finished(self, policy_version: int) -> None:
        """What it was given before is trained; it may have waited since."""
        if self._part is not None and self._timeline_start is not None:
            began, busy_before, groups = self._part
            start = max(0.0, began - self._timeline_start)
            end = began + self.trainer_busy_s() - busy_before - self._timeline_start
            self._trainer_spans.append(_span(start, end, "training", policy_version, groups))
        self._part = None

    def flush(self) -> None:
        """Count all rollouts' seconds until now."""
        now = self.now()
        for track in self._tracks.values():
            self._account(track, now)

    def start_timeline(self) -> None:
        """Lanes begin now."""
        self._timeline_start = self.now()
        for name in self.timeline:
            track = self._tracks[name]
            track.span_start = self._timeline_start
            track.spans = []

    def end_timeline(self) -> list[Lane]:
        """The lanes until now, the trainer's first; none are kept any longer."""
        now = self.now()
        lanes = [Lane(name="trainer", spans=self._trainer_spans)]
        for name in self.timeline:
            track = self._tracks[name]
            self._end_span(track, now, "generating" if track.seen_running else "idle", track.seen_running)
            lanes.append(Lane(name=name, spans=track.spans or []))
            track.spans = None
        self._timeline_start, self._trainer_spans = None, []
        return lanes

    def _look(self, track: _Track, now: float) -> None:
        if now > track.since:  # most starts come many at once
            self._account(track, now)
        if now > track.span_start:
            self._end_span(track, now, "generating" if track.seen_running else "idle", track.seen_running)
        running = track.running
        track.peak = max(track.peak, running)
        track.seen_running = running
        threshold = track.peak * TAIL_FRACTION
        track.low = running / BAND if running < threshold else max(running / BAND, threshold)
        track.high = min(running * BAND, track.peak)
        if running < threshold:
            track.high = min(track.high, math.ceil(threshold) - 1)
        if running == 0:
            track.high = 0

    def _account(self, track: _Track, now: float) -> None:
        busy = self.trainer_busy_s()
        if track.seen_running == 0:
            # Once a newer version is published it waits for weights, not for the trainer.
            until = self._published.get(track.policy_version + 1, busy)
            self.seconds.idle_while_training += max(0.0, until - track.trained_at_since)
        elif track.seen_running < track.peak * TAIL_FRACTION:
            self.seconds.long_tail += now - track.since
        track.since = now
        track.trained_at_since = busy

    def _end_span(self, track: _Track, now: float, activity: str, running: int) -> None:
        if track.spans is not None and self._timeline_start is not None and now > track.span_start:
            start = track.span_start - self._timeline_start
            track.spans.append(_span(start, now - self._timeline_start, activity, track.policy_version, running))
        track.span_start = now


def _span(start_s: float, end_s: float, activity: str, policy_version: int, running: int) -> Span:
    return Span(
        start_s=round(start_s, 3),
        end_s=round(end_s, 3),
        activity=activity,
        policy_version=policy_version,
        running=running,
    )

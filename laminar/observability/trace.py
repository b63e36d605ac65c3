"""`trace.json`: who did what when, for Perfetto (https://ui.perfetto.dev) or chrome://tracing, in Chrome's JSON array format.

A process per rollout: a track with its pulls, and as many tracks as it had trajectories at once, a span for each; the trainer's
steps; the relays' broadcasts. A move is an arrow from the span that ends at the source to the one that begins at the target.

Invariants: on a track spans follow each other and never overlap; every line is written when its event happens, so that what a
crash leaves can be loaded (the format allows the closing bracket to be missing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from laminar.observability.events import (
    EventBus,
    GroupDropped,
    StepFinished,
    StepStarted,
    TrajectoryFinished,
    TrajectoryMoved,
    TrajectoryOrphaned,
    TrajectoryStarted,
    WeightsBroadcast,
    WeightsPulled,
)
from laminar.trajectory import Trajectory

Line = dict[str, Any]

TRAINER, RELAYS, FIRST_ROLLOUT = 1, 2, 10  # process numbers in the trace
PULLS = 0  # track of a rollout; those of its trajectories follow


@dataclass(kw_only=True, slots=True)
class _Lanes:
    """Tracks of one rollout."""

    process: int
    free: list[int] = field(default_factory=list)  # heap
    made: int = 0

    def take(self) -> int:
        if self.free:
            return heappop(self.free)
        self.made += 1
        return PULLS + self.made


class Trace:
    """Subscribes to the bus; `write` takes lines."""

    def __init__(self, events: EventBus, now: Callable[[], float], write: Callable[[Iterable[Line]], None]) -> None:
        """`now`: seconds since the start of the run."""
        self._now = now
        self._write = write
        self._rollouts: dict[str, _Lanes] = {}
        self._at: dict[str, tuple[str, int]] = {}  # trajectory -> rollout and track of its open span
        self._arrows = 0
        self._step_open = False
        write([_name(TRAINER, "trainer"), _name(RELAYS, "relays")])
        events.subscribe(lambda event: self._begin(event.trajectory, event.trajectory.rollout or ""), TrajectoryStarted)
        events.subscribe(self._on_moved, TrajectoryMoved)
        events.subscribe(self._on_ended, TrajectoryFinished, TrajectoryOrphaned)
        events.subscribe(self._on_dropped, GroupDropped)
        events.subscribe(self._on_pulled, WeightsPulled)
        events.subscribe(self._on_broadcast, WeightsBroadcast)
        events.subscribe(self._on_step_started, StepStarted)
        events.subscribe(self._on_step_finished, StepFinished)

    def _begin(self, trajectory: Trajectory, rollout: str) -> None:
        lanes = self._lanes(rollout)
        track = lanes.take()
        self._at[trajectory.trajectory_id] = rollout, track
        arguments = {
            "version": trajectory.policy_version,
            "lease": trajectory.lease,
            "prompt_tokens": len(trajectory.prompt.token_ids),
            "response_tokens": trajectory.num_tokens,
        }
        self._write([self._line("B", lanes.process, track, name=trajectory.trajectory_id, args=arguments)])

    def _end(self, trajectory: Trajectory) -> None:
        """Close its span, if one is open."""
        where = self._at.pop(trajectory.trajectory_id, None)
        if where is None:
            return
        rollout, track = where
        lanes = self._rollouts[rollout]
        heappush(lanes.free, track)
        arguments = {"response_tokens": trajectory.num_tokens, "state": trajectory.state.value}
        self._write([self._line("E", lanes.process, track, args=arguments)])

    def _on_ended(self, event: TrajectoryFinished | TrajectoryOrphaned) -> None:
        self._end(event.trajectory)

    def _on_moved(self, event: TrajectoryMoved) -> None:
        trajectory = event.trajectory
        where = self._at.get(trajectory.trajectory_id)
        arrow = {"name": "move", "cat": "repack", "id": self._arrows}
        if where is not None:
            # An arrow starts within the span that it leaves: before that ends.
            self._write([self._line("s", self._rollouts[where[0]].process, where[1], **arrow)])
            self._end(trajectory)
        self._begin(trajectory, event.rollout)
        if where is not None:
            _, track = self._at[trajectory.trajectory_id]
            self._write([self._line("f", self._rollouts[event.rollout].process, track, bp="e", **arrow)])
            self._arrows += 1

    def _on_dropped(self, event: GroupDropped) -> None:
        for trajectory in event.group.trajectories:
            self._end(trajectory)

    def _on_pulled(self, event: WeightsPulled) -> None:
        process = self._lanes(event.rollout).process
        self._write([self._past(process, PULLS, f"pull version {event.policy_version}", event.seconds)])

    def _on_broadcast(self, event: WeightsBroadcast) -> None:
        arguments = {"relays": event.relays, "received_bytes": event.received_bytes, "error": event.error}
        name = f"broadcast version {event.policy_version}"
        self._write([self._past(RELAYS, 0, name, event.seconds, args=arguments)])

    def _on_step_started(self, event: StepStarted) -> None:
        lines = [self._line("E", TRAINER, 0)] if self._step_open else []  # it was lost, or goes on with another part
        lines.append(self._line("B", TRAINER, 0, name=f"step {event.step}", args={"groups": event.groups}))
        self._step_open = True
        self._write(lines)

    def _on_step_finished(self, event: StepFinished) -> None:
        if self._step_open:
            self._write([self._line("E", TRAINER, 0)])
        self._step_open = False

    def _lanes(self, rollout: str) -> _Lanes:
        lanes = self._rollouts.get(rollout)
        if lanes is None:
            lanes = self._rollouts[rollout] = _Lanes(process=FIRST_ROLLOUT + len(self._rollouts))
            self._write([_name(lanes.process, rollout)])
        return lanes

    def _line(self, phase: str, process: int, track: int, **rest: Any) -> Line:
        return {"ph": phase, "ts": round(self._now() * 1e6), "pid": process, "tid": track, **rest}

    def _past(self, process: int, track: int, name: str, seconds: float, **rest: Any) -> Line:
        """A span that ends now."""
        end = self._now()
        start = max(0.0, end - seconds)
        times = {"ts": round(start * 1e6), "dur": round((end - start) * 1e6)}
        return {"ph": "X", "name": name, **times, "pid": process, "tid": track, **rest}


def _name(process: int, name: str) -> Line:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}

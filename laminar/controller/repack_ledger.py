"""What each move came to: how long its trajectories paused, and what the freed rollout did until the source would have drained.

When the source would have drained is not known; it is taken to be when the last moved trajectory ended where it went on.
Invariants: every move is settled once: when its trajectories have ended, or when its source is lost or emptied again; a token is
counted for one move only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from laminar.controller.repack_planner import Move
from laminar.observability.events import (
    EventBus,
    GroupDropped,
    KvMoved,
    RepackSettled,
    RolloutLost,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryMoved,
)
from laminar.trajectory import Trajectory


@dataclass(kw_only=True, slots=True)
class _Entry:
    """A move whose trajectories are still under way."""

    move: Move
    stopped_at: float
    moved: set[str]
    left: set[str]  # of the moved, those that have not ended
    tokens: int
    pauses: list[float] = field(default_factory=list)
    kv_tokens: int = 0
    kv_bytes: int = 0
    gained_tokens: int = 0


class RepackLedger:
    """Listens to the run; told of each move by the repacker."""

    def __init__(self, events: EventBus, now: Callable[[], float]) -> None:
        self._events = events
        self._now = now
        self._open: dict[str, _Entry] = {}  # by source
        self._sources_of: dict[str, list[str]] = {}  # moved trajectory that has not ended -> sources, in order
        events.subscribe(self._on_tokens, TokensAppended)
        events.subscribe(self._on_leased, TrajectoryMoved)
        events.subscribe(self._on_kv_moved, KvMoved)
        events.subscribe(lambda event: self._on_ended([event.trajectory]), TrajectoryFinished)
        events.subscribe(lambda event: self._on_ended(event.group.trajectories), GroupDropped)
        events.subscribe(self._on_lost, RolloutLost)

    def moved(self, move: Move, trajectories: Iterable[Trajectory], *, stopped_at: float) -> None:
        """The source has stopped these trajectories, and they wait for the target or go on there."""
        if move.source in self._open:
            self._settle(move.source)
        chosen = list(trajectories)
        if not chosen:
            return
        ids = {one.trajectory_id for one in chosen}
        self._open[move.source] = _Entry(
            move=move,
            stopped_at=stopped_at,
            moved=ids,
            left=set(ids),
            tokens=sum(len(one.prompt.token_ids) + one.num_tokens for one in chosen),
        )
        for trajectory_id in ids:
            self._sources_of.setdefault(trajectory_id, []).append(move.source)

    def _on_tokens(self, event: TokensAppended) -> None:
        entry = self._open.get(event.rollout)
        if entry is not None:
            entry.gained_tokens += event.tokens

    def _newest(self, trajectory_id: str) -> _Entry | None:
        """The newest move of a trajectory, while that is open."""
        sources = self._sources_of.get(trajectory_id)
        return self._open.get(sources[-1]) if sources else None

    def _on_kv_moved(self, event: KvMoved) -> None:
        entry = self._newest(event.trajectory_id)
        if entry is not None:
            entry.kv_tokens += event.tokens
            entry.kv_bytes += event.nbytes

    def _on_leased(self, event: TrajectoryMoved) -> None:
        entry = self._newest(event.trajectory.trajectory_id)
        if entry is not None and len(entry.pauses) < len(entry.moved):  # else it was orphaned, and moved once more
            entry.pauses.append(self._now() - entry.stopped_at)

    def _on_ended(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            for source in self._sources_of.pop(trajectory.trajectory_id, ()):
                self._remove(source, trajectory.trajectory_id)

    def _on_lost(self, event: RolloutLost) -> None:
        if event.rollout in self._open:
            self._settle(event.rollout)

    def _remove(self, source: str, trajectory_id: str) -> None:
        entry = self._open.get(source)
        if entry is None:
            return
        entry.left.discard(trajectory_id)
        if not entry.left:
            self._settle(source)

    def _settle(self, source: str) -> None:
        entry = self._open.pop(source)
        for trajectory_id in entry.left:
            sources = self._sources_of[trajectory_id]
            sources.remove(source)
            if not sources:
                del self._sources_of[trajectory_id]
        self._events.emit(
            RepackSettled(
                source=source,
                target=entry.move.target,
                trajectories=len(entry.moved),
                tokens=entry.tokens,
                kv_tokens=entry.kv_tokens,
                kv_bytes=entry.kv_bytes,
                planned_frees_s=entry.move.frees_s,
                planned_costs_s=entry.move.costs_s,
                freed_s=self._now() - entry.stopped_at,
                pause_s_mean=sum(entry.pauses) / len(entry.pauses) if entry.pauses else 0.0,
                pause_s_max=max(entry.pauses, default=0.0),
                gained_tokens=entry.gained_tokens,
            )
        )

"""One line of metrics per step, from the events since the step before.

Rates are per second of wall clock between two steps; fractions are of the same interval. Idle fractions follow from the
state clocks of the trainer and of each rollout, so their causes add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from laminar.controller.state_clock import StateClock, difference
from laminar.observability.events import (
    EventBus,
    GroupDropped,
    KvMoved,
    MetricsReported,
    PromptRejected,
    RepackSettled,
    RolloutsRepacked,
    StepFinished,
    TokensAppended,
    WeightsBroadcast,
    WeightsPublished,
    WeightsPulled,
)
from laminar.observability.states import ROLLOUT_BUSY, TRAINER_BUSY
from laminar.trajectory import part_means


class StepMetrics:
    """Subscribes to the bus and reports `MetricsReported` after every `StepFinished`."""

    def __init__(
        self,
        events: EventBus,
        *,
        now: Callable[[], float],
        trainer_clock: StateClock,
        rollout_clocks: Callable[[], Mapping[str, StateClock]],
        gauges: Callable[[], dict[str, float]],
    ) -> None:
        self._events = events
        self._now = now
        self._started = self._last = now()
        self._trainer_clock = trainer_clock
        self._rollout_clocks = rollout_clocks
        self._gauges = gauges
        self._trainer_before: dict[str, float] = {}
        self._rollouts_before: dict[str, dict[str, float]] = {}
        self._generated = 0
        self._late = 0
        self._kv: list[float] = []
        self._publish_stall_s = 0.0
        self._broadcasts: list[float] = []
        self._broadcast_bytes: list[float] = []
        self._pulls: list[float] = []
        self._dropped = 0
        self._resampled = 0
        self._rejected = 0
        self._kv_moves = 0
        self._kv_moved_bytes = 0
        self._kv_refused = 0
        self._moves: list[RolloutsRepacked] = []
        self._settled: list[RepackSettled] = []
        events.subscribe(self._on_tokens, TokensAppended)
        events.subscribe(self._on_weights, WeightsPublished, WeightsBroadcast, WeightsPulled)
        events.subscribe(self._on_kv_moved, KvMoved)
        events.subscribe(self._on_loss, GroupDropped, PromptRejected)
        events.subscribe(lambda event: self._moves.append(event), RolloutsRepacked)
        events.subscribe(lambda event: self._settled.append(event), RepackSettled)
        events.subscribe(self._on_step, StepFinished)

    def start(self) -> None:
        """Begin the first interval now: warm-up does not count as idle time."""
        self._last = self._now()
        self._trainer_before = self._trainer_clock.totals()
        self._rollouts_before = self._rollout_totals()

    def _on_tokens(self, event: TokensAppended) -> None:
        self._generated += event.tokens
        self._late += event.late_tokens
        self._kv.append(event.kv_utilization)

    def _on_weights(self, event: WeightsPublished | WeightsBroadcast | WeightsPulled) -> None:
        if isinstance(event, WeightsPublished):
            self._publish_stall_s = event.publish_stall_s
        elif isinstance(event, WeightsBroadcast):
            self._broadcasts.append(event.seconds)
            self._broadcast_bytes.append(float(event.received_bytes))
        else:
            self._pulls.append(event.seconds)

    def _on_kv_moved(self, event: KvMoved) -> None:
        self._kv_moves += not event.error
        self._kv_moved_bytes += event.nbytes
        self._kv_refused += bool(event.error)

    def _on_loss(self, event: GroupDropped | PromptRejected) -> None:
        if isinstance(event, GroupDropped):
            self._resampled += event.resampled
            self._dropped += not event.resampled
        else:
            self._rejected += 1

    def _rollout_totals(self) -> dict[str, dict[str, float]]:
        return {name: clock.totals() for name, clock in self._rollout_clocks().items()}

    def _on_step(self, event: StepFinished) -> None:
        now = self._now()
        interval = max(now - self._last, 1e-9)
        trainer, rollouts = self._trainer_clock.totals(), self._rollout_totals()
        trainer_s = difference(trainer, self._trainer_before)
        each_s = {name: difference(after, self._rollouts_before.get(name, {})) for name, after in rollouts.items()}
        rollout_s: Counter[str] = Counter()
        for seconds in each_s.values():
            rollout_s.update(seconds)
        trajectories = [trajectory for group in event.groups for trajectory in group.trajectories]
        lengths = np.array([trajectory.num_tokens for trajectory in trajectories])
        staleness = [trajectory.staleness or 0 for trajectory in trajectories]
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
        tokens = int(lengths.sum()) + sum(len(trajectory.prompt.token_ids) for trajectory in trajectories)
        line: dict[str, Any] = {
            "step": event.step,
            "policy_version": event.policy_version,
            "time_s": now - self._started,
            "step_s": interval,
            "reward_mean": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
            "reward_parts": part_means(trajectory.reward_parts or {} for trajectory in trajectories),
            "staleness_mean": float(np.mean(staleness)),
            "staleness_max": int(max(staleness)),
            "publish_stall_s": self._publish_stall_s,
            "broadcast_s": _mean(self._broadcasts),
            "broadcast_bytes": _mean(self._broadcast_bytes),
            "pull_s_mean": _mean(self._pulls),
            "pulls": len(self._pulls),
            "generated_tokens_per_s": self._generated / interval,
            "trained_tokens_per_s": tokens / interval,
            "train_s": event.train_s,
            "kv_utilization_mean": _mean(self._kv) or 0.0,
            "trainer_idle_fraction": _idle(trainer_s, TRAINER_BUSY),
            "rollout_idle_fraction": _idle(rollout_s, ROLLOUT_BUSY),
            "trainer_seconds": _nonzero(trainer_s),
            "rollout_seconds": _nonzero(rollout_s),
            "each_rollout_seconds": {name: _nonzero(seconds) for name, seconds in each_s.items()},
            "response_tokens_mean": float(lengths.mean()),
            "response_tokens_p50": float(np.median(lengths)),
            "response_tokens_max": int(lengths.max()),
            "finish_length_fraction": float(np.mean([t.finish_reason == "length" for t in trajectories])),
            "finish_turns_fraction": float(np.mean([t.finish_reason == "turns" for t in trajectories])),
            "turns_mean": float(np.mean([max(1, len(t.turns)) for t in trajectories])),
            "environment_s_mean": float(np.mean([t.environment_s for t in trajectories])),
            "groups_dropped": self._dropped,
            "groups_resampled": self._resampled,
            "prompts_rejected": self._rejected,
            "late_tokens_dropped": self._late,
            "kv_moves": self._kv_moves,
            "kv_moved_bytes": self._kv_moved_bytes,
            "kv_refused": self._kv_refused,
            **self._repack(),
            **self._gauges(),
        }
        for name, value in event.trainer_metrics.items():
            line.setdefault(name, value)
        self._last, self._trainer_before, self._rollouts_before = now, trainer, rollouts
        self._generated = 0
        self._kv, self._broadcasts, self._broadcast_bytes, self._pulls = [], [], [], []
        self._moves, self._settled = [], []
        self._events.emit(MetricsReported(line=line))

    def _repack(self) -> dict[str, float | None]:
        """Of the moves that were made in this interval, and of those that were settled in it."""
        return {
            "repack_moves": len(self._moves),
            "repack_trajectories": sum(move.trajectories for move in self._moves),
            "repack_tokens": sum(move.tokens for move in self._moves),
            "repack_pause_s_mean": _mean([move.pause_s_mean for move in self._settled]),
            "repack_freed_s": sum(move.freed_s for move in self._settled),
            "repack_gained_tokens": sum(move.gained_tokens for move in self._settled),
        }


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _idle(seconds: Mapping[str, float], busy: tuple[str, ...]) -> float:
    total = sum(seconds.values())
    return 1.0 - sum(seconds.get(state, 0.0) for state in busy) / total if total > 0 else 0.0


def _nonzero(seconds: Mapping[str, float]) -> dict[str, float]:
    return {state: round(value, 4) for state, value in seconds.items() if value > 0}

"""What the repack planner is told: the load of each rollout, the bounds, and how many rollouts are worth freeing.

Invariants: a rollout is planned with only when its newest poll has not been planned with before; nothing here changes the run.
"""

from __future__ import annotations

import asyncio

from laminar.config.schema import ExperimentConfig
from laminar.controller.batch_bound import BatchBoundFit, StepLatency, StepSample
from laminar.controller.experience_buffer import ExperienceBuffer
from laminar.controller.repack_planner import RepackBounds, RolloutObservation
from laminar.controller.replica import Replica
from laminar.controller.response_lengths import ResponseLengths
from laminar.controller.rollout_manager import RolloutManager
from laminar.controller.straggler_wait import StragglerWait
from laminar.observability.events import EventBus, GroupCompleted, StepFinished, StepStarted, TrajectoryFinished
from laminar.protocol.messages import DecodeSteps

STRAGGLER_WAIT = 0.05  # share of the time that the trainer may wait for stragglers before none is slowed any more


class RepackInputs:
    """Listens to the run, and answers for a plan."""

    def __init__(
        self, manager: RolloutManager, buffer: ExperienceBuffer, events: EventBus, config: ExperimentConfig
    ) -> None:
        self._manager = manager
        self._buffer = buffer
        self._config = config.repack
        self._rollout = config.rollout
        self._fits: dict[int, BatchBoundFit] = {}  # by tensor parallel degree
        self._lengths = ResponseLengths(config.rollout.max_response_tokens)
        self._now = asyncio.get_running_loop().time
        self._stragglers = StragglerWait(config.trainer.groups_per_step, self._now())
        events.subscribe(lambda event: self._lengths.finished(event.trajectory.num_tokens), TrajectoryFinished)
        events.subscribe(lambda _: self._stragglers.ready(len(buffer), self._now()), GroupCompleted)
        events.subscribe(lambda _: self._stragglers.step_started(len(buffer), self._now()), StepStarted)
        events.subscribe(lambda _: self._stragglers.step_finished(self._now()), StepFinished)

    def add_steps(self, replica: Replica, steps: DecodeSteps) -> None:
        """Decode steps that a rollout has reported."""
        self._fits.setdefault(self._degree_of(replica), BatchBoundFit()).add(
            StepSample(running=running, kv_utilization=kv, seconds=seconds)
            for running, kv, seconds in zip(
                steps.running.tolist(), steps.kv_utilization.tolist(), steps.seconds.tolist(), strict=True
            )
        )

    def batch_bound(self) -> int:
        """B, for contexts as long as those of the rollouts that drain now; the smallest of all degrees."""
        given = self._config.batch_bound
        if given != "auto":
            return given
        kv = self._kv_per_trajectory()
        fitted = [
            latency.bound(self._config.slowdown, kv)
            for fit in self._fits.values()
            if (latency := fit.latency()) is not None
        ]
        most = min(self._rollout.max_running, self._config.batch_bound_ceiling or self._rollout.max_running)
        return min(most, max(self._config.batch_bound_floor, min(fitted, default=1)))

    def bounds(self) -> RepackBounds:
        """What a plan has to keep to now."""
        wanted, why_no_more = self._wanted()
        return RepackBounds(
            kv_ceiling=self._config.kv_ceiling,
            batch_bound=self.batch_bound(),
            move_s_per_token=self._move_s_per_token(),
            wanted=wanted,
            why_no_more=why_no_more,
        )

    def why_not_observed(self, replica: Replica) -> str:
        """Why a rollout cannot be planned with at all; empty if it can."""
        if replica.stopping_for is not None:
            return "it is being emptied"
        if not self._manager.fleet.takes_work(replica):
            return "it is not heard, or leaves the run: it may be given nothing"
        if replica.receiving:
            return "it takes in others at the moment"
        if not replica.in_flight:
            return "it has no trajectory"
        if replica.observed is None or (replica.observed_before is None and not self._is_draining(replica)):
            return "it has not said its load often enough since it took its weights"
        return ""

    def observation(self, replica: Replica) -> RolloutObservation:
        """Its load, for the planner; `why_not_observed` said nothing.

        One that drains takes no new trajectories, so it needs no second poll to show that it has no more than before. Where
        versions follow each other faster than polls there is none.
        """
        newest = replica.observed
        assert newest is not None
        before, draining = replica.observed_before or newest, self._is_draining(replica)
        return RolloutObservation(
            rollout=replica.name,
            policy_version=replica.policy_version,
            running=newest.running,
            waiting=newest.waiting,
            kv_utilization=newest.kv_utilization,
            previous_kv_utilization=before.kv_utilization,
            previous_running=before.running,
            draining=draining,
            tensor_parallel=self._degree_of(replica),
            context_tokens=_context_tokens(replica) if draining else 0,
            drains_in_s=self._drains_in_s(replica) if draining else None,
        )

    def _wanted(self) -> tuple[int, str]:
        share = self._stragglers.share
        if share > STRAGGLER_WAIT:
            return 0, (
                f"the trainer waits for stragglers {100 * share:.0f} % of the time (schedule.max_staleness): none may be slowed"
            )
        wanted = self._manager.rollouts_wanted()
        if not wanted:
            return 0, "no group could start on it: rollouts that are free take all that may (docs/repack.md)"
        return wanted, f"the {wanted} that are freed are enough for all groups that may start"

    def _is_draining(self, replica: Replica) -> bool:
        return self._manager.relays.published_version > replica.policy_version

    def _degree_of(self, replica: Replica) -> int:
        return self._rollout.degree(int(replica.name.rpartition("-")[2]))

    def _kv_per_trajectory(self) -> float:
        """KV utilization over trajectories, of the rollouts that drain."""
        loads = [
            replica.observed
            for replica in self._manager.replicas.values()
            if replica.observed is not None and replica.in_flight and self._is_draining(replica)
        ]
        requests = sum(load.running + load.waiting for load in loads)
        return sum(load.kv_utilization for load in loads) / requests if requests else 0.0

    def _latency(self, replica: Replica) -> StepLatency | None:
        fit = self._fits.get(self._degree_of(replica))
        return None if fit is None else fit.latency()

    def _drains_in_s(self, replica: Replica) -> float | None:
        """Seconds until its last trajectory will have ended, at the pace of a decode step now."""
        latency, load = self._latency(replica), replica.observed
        if latency is None or load is None:
            return None
        tokens = self._lengths.remaining(trajectory.num_tokens for trajectory in replica.in_flight.values())
        return tokens * latency.at(load.running, load.kv_utilization)

    def _move_s_per_token(self) -> float:
        """Measured by the rollouts: of a prefill, or of a move of KV where they make them; 0 while nothing is."""
        loads = [replica.observed for replica in self._manager.replicas.values() if replica.observed is not None]
        prefill_s = _mean([load.prefill_s_per_token for load in loads])
        kv_move_s = _mean([load.kv_move_s_per_token for load in loads])
        if self._config.move_kv == "never" or not kv_move_s:
            return prefill_s
        return kv_move_s if self._config.move_kv == "always" or not prefill_s else min(prefill_s, kv_move_s)


def _mean(costs: list[float]) -> float:
    """Of those that were measured; 0 if none was."""
    measured = [cost for cost in costs if cost > 0]
    return sum(measured) / len(measured) if measured else 0.0


def _context_tokens(replica: Replica) -> int:
    return sum(len(one.prompt.token_ids) + one.num_tokens for one in replica.in_flight.values())

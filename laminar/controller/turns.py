"""Turns of multi-turn trajectories: each goes to an environment worker, and comes back with an observation, or for good.

  TurnEnded --> [ EnvironmentManager.step ] --> observation appended, on to its rollout again
                                           \\--> done: TrajectoryFinished      \\--> failed for good: TrajectoryFailed

Invariants: while the environment has a trajectory no rollout works on it, and it stays in the partial response pool; what
comes back is appended once, behind the tokens as they were generated; it goes on at the rollout that had it if that still
serves its version, or as an orphan. A trajectory whose turn cannot be answered fails alone.
"""

from __future__ import annotations

import asyncio
import math

from laminar.config.held_out import max_evaluation_tokens
from laminar.config.schema import ExperimentConfig
from laminar.controller.environment_manager import EnvironmentManager
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.rollout_fleet import RolloutFleet
from laminar.errors import RunFailed
from laminar.observability.events import EventBus, TrajectoryFailed, TrajectoryFinished, TurnAnswered, TurnEnded
from laminar.protocol.messages import EnvironmentStepped
from laminar.trajectory import Trajectory, TrajectoryState, Turn

FAILED_GROUPS = 8  # in a row, and no turn answered meanwhile: it is the environment that is at fault


class Turns:
    """Hands turns over, and takes the answers in."""

    def __init__(
        self,
        environments: EnvironmentManager,
        pool: PartialResponsePool,
        fleet: RolloutFleet,
        events: EventBus,
        config: ExperimentConfig,
    ) -> None:
        self.pending = 0  # turns that wait for their answer
        self._failed_in_a_row = 0  # groups on which the environment has failed
        self._environments = environments
        self._pool = pool
        self._fleet = fleet
        self._events = events
        self._retries = config.environment.retries
        self._max_turns = config.environment.max_turns
        self._max_response_tokens = config.rollout.max_response_tokens
        self._max_evaluation_tokens = max_evaluation_tokens(config)
        self._mixes_versions = config.schedule.name == "partial"
        self._now = asyncio.get_running_loop().time
        events.subscribe(lambda event: self._ask(event.trajectory, self._now(), self._retries), TurnEnded)

    def ask_again(self, trajectory: Trajectory) -> None:
        """A turn whose answer an earlier controller has not lived to see."""
        self._ask(trajectory, self._now(), self._retries)

    def _ask(self, trajectory: Trajectory, asked_at: float, retries_left: int) -> None:
        lease = trajectory.lease
        self.pending += 1

        def answered(answer: EnvironmentStepped | None, failure: RunFailed | None) -> None:
            self.pending -= 1
            if trajectory.state is not TrajectoryState.ENVIRONMENT or trajectory.lease != lease:
                return  # its group was dropped meanwhile
            error = _error(answer, failure)
            if answer is not None and not error:
                self._take_in(trajectory, answer, self._now() - asked_at)
            elif retries_left:
                self._ask(trajectory, asked_at, retries_left - 1)
            else:
                self._fail(trajectory, error)
                if answer is not None and trajectory.evaluation is None:  # not a worker that was lost
                    self._count_failure(trajectory)

        self._environments.step(trajectory, answered)

    def _count_failure(self, trajectory: Trajectory) -> None:
        """Its group has been dropped. Raises RunFailed if that was so with all of late."""
        self._failed_in_a_row += 1
        if self._failed_in_a_row == FAILED_GROUPS:
            raise RunFailed(
                f"{trajectory.error}. {FAILED_GROUPS} groups in a row had to be dropped, and the environment has answered no "
                "turn meanwhile"
            )

    def _take_in(self, trajectory: Trajectory, answer: EnvironmentStepped, seconds: float) -> None:
        self._failed_in_a_row = 0
        start, end = trajectory.turn_start, trajectory.num_tokens
        last = len(trajectory.turns) + 1 == self._max_turns
        most = self._max_response_tokens if trajectory.evaluation is None else self._max_evaluation_tokens
        fits = end + len(answer.token_ids) < most  # and leaves room for another turn
        goes_on = fits and not last and not answer.done
        if goes_on and len(answer.token_ids):
            trajectory.observe(answer.token_ids)
        trajectory.turns.append(
            Turn(start=start, end=end, observation_end=trajectory.num_tokens, reward=answer.reward, seconds=seconds)
        )
        self._events.emit(TurnAnswered(trajectory=trajectory))
        if goes_on:
            self._go_on(trajectory)
        else:
            self._finish(trajectory, "stop" if answer.done else "turns" if last else "length")
            self._events.emit(TrajectoryFinished(trajectory=trajectory))

    def _go_on(self, trajectory: Trajectory) -> None:
        replica = self._fleet.replicas.get(trajectory.rollout or "")
        mixes = self._mixes_versions and trajectory.evaluation is None
        if replica is not None and (mixes or replica.policy_version == trajectory.policy_version):
            self._pool.destine(trajectory, replica.name)
            replica.wake.set()
        else:
            self._fleet.orphan(trajectory)

    def _fail(self, trajectory: Trajectory, error: str) -> None:
        turn = len(trajectory.turns) + 1
        trajectory.error = f"turn {turn} of trajectory {trajectory.trajectory_id} was not answered: {error}"
        self._finish(trajectory, "error")
        trajectory.move_to(TrajectoryState.FAILED)
        self._events.emit(TrajectoryFailed(trajectory=trajectory))

    def _finish(self, trajectory: Trajectory, finish_reason: str) -> None:
        rollout = trajectory.rollout
        self._pool.finish(trajectory, finish_reason, self._now())
        if not self._pool.held:
            self._fleet.wake_all()  # under a schedule that synchronizes, the last to drain lets all others go on
        elif (replica := self._fleet.replicas.get(rollout or "")) is not None:
            replica.wake.set()  # it may have drained


def _error(answer: EnvironmentStepped | None, failure: RunFailed | None) -> str:
    """Why there is no answer that can be used; empty if there is one."""
    if answer is None:
        return f"{failure} (environment.step_timeout_s)"
    if not answer.error and not math.isfinite(answer.reward):
        return f"the environment's reward is {answer.reward}"
    return answer.error

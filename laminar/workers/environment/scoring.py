"""The weighted sum of a reward's parts, each with its own limit and attempts.

Invariant: every trajectory gets one `Score`, whatever its parts do, within `RewardConfig.longest_s` of asking; its parts are
scored side by side, and no trajectory waits for another's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

from laminar.config.reward_schema import RewardPart
from laminar.config.schema import ExperimentConfig
from laminar.rewards.built_in import ASYNC
from laminar.rewards.conventions import RewardInput
from laminar.rewards.registry import load_parts, overtime_is_zero
from laminar.rewards.reward import Outcome, Reward
from laminar.workers.environment.reward_lanes import LaneDied, Overtime, RewardLanes
from laminar.workers.environment.user_code import UserCodeThread

log = logging.getLogger("laminar.reward")


@dataclass(kw_only=True, slots=True, frozen=True)
class Score:
    """The sum and its parts, or why there is none."""

    reward: float  # NaN where error is set
    parts: dict[str, float]  # before weighting, by label; only those that apply to the prompt's source
    error: str  # one line; "" for a valid reward


class Scoring:
    """All parts of a reward, ready to be called."""

    def __init__(self, config: ExperimentConfig, lanes: RewardLanes, thread: UserCodeThread) -> None:
        """`lanes` have been started; `thread` is where coroutine functions run; `start` loads everything."""
        self._config = config.reward
        self._experiment = config
        self._lanes = lanes
        self._thread = thread
        self._parts = config.reward.terms()
        self._in_loop: dict[int, Reward] = {}

    async def start(self) -> None:
        """Load the parts.

        Raises:
            UserError: one of them cannot be loaded.
        """
        in_loop = {place for place, part in enumerate(self._parts) if part.function in ASYNC}
        in_loop.update(await self._lanes.loaded())
        if in_loop:
            loaded = await self._thread.call(load_parts, self._experiment, in_loop)
            self._in_loop = {place: part.reward for place, part in loaded.items()}

    async def score(self, request: RewardInput) -> Score:
        """Score a response by every part that applies to its source."""
        applying = [
            (place, part)
            for place, part in enumerate(self._parts)
            if part.sources is None or request.source in part.sources
        ]
        if not applying:
            return Score(
                reward=math.nan,
                parts={},
                error=f"trajectory {request.trajectory_id}: no part of the reward is for the source {request.source!r} "
                "(reward.parts.*.sources)",
            )
        outcomes = await asyncio.gather(*(self._attempts(place, part, request) for place, part in applying))
        error = next((outcome.error for outcome in outcomes if outcome.error), "")
        total, parts = 0.0, {}
        for (_, part), outcome in zip(applying, outcomes, strict=True):
            total += part.weight * outcome.reward
            parts[part.label] = outcome.reward
        if error:
            return Score(reward=math.nan, parts={}, error=error)
        return Score(reward=total, parts=parts, error="")

    async def _attempts(self, place: int, part: RewardPart, request: RewardInput) -> Outcome:
        attempts = self._config.attempts(part)
        for attempt in range(1, attempts + 1):
            outcome = await self._attempt(place, part, request)
            if not outcome.error:
                return outcome
            if attempt < attempts:
                log.warning("%s; attempt %d of %d", outcome.error, attempt, attempts)
        return outcome

    async def _attempt(self, place: int, part: RewardPart, request: RewardInput) -> Outcome:
        limit_s = self._config.limit_s(part)
        try:
            if place in self._in_loop:
                return await self._thread.run(_within(limit_s, self._in_loop[place], request))
            return await self._lanes.call(place, request, limit_s)
        except Overtime:
            what = f"took longer than {limit_s:g} s (timeout_s)"
            if overtime_is_zero(part):
                log.warning("trajectory %s: reward %s %s: 0", request.trajectory_id, part.label, what)
                return Outcome(reward=0.0, error="")
        except LaneDied as error:
            what = f"lost its process ({error})"
        return Outcome(reward=math.nan, error=f"trajectory {request.trajectory_id}: reward {part.label} {what}")


async def _within(limit_s: float, reward: Reward, request: RewardInput) -> Outcome:
    try:
        async with asyncio.timeout(limit_s):
            return await reward.score(request)
    except TimeoutError:
        raise Overtime from None

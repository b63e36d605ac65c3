"""Calls of environment workers: prompts and rewards. One call at a time per worker, each with a limit.

Invariant: every finished trajectory leaves here once, with a reward or with a reason, unless its group was dropped
meanwhile. A worker that dies or exceeds the limit is replaced; its call is made once more elsewhere if the worker died,
and failed if the user's code hung.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import EventBus, Notice, TrajectoryScored, WorkerReplaced
from laminar.protocol import messages
from laminar.trajectory import Trajectory, TrajectoryState

SCORE_ATTEMPTS = 2  # the user's code may be what kills the worker
FETCH_ATTEMPTS = 5
REPLACE_ATTEMPTS = 5  # in a row, for one worker


@dataclass(kw_only=True, slots=True)
class _Call:
    message: object
    answer: type
    matches: Callable[[Any], bool]
    limit_s: float
    attempts_left: int
    wanted: Callable[[], bool]
    done: Callable[[Any | None, RunFailed | None], None]  # the answer, or why there is none


class EnvironmentManager:
    """A queue of calls, and one coroutine per environment worker that works through it."""

    def __init__(
        self,
        registry: WorkerRegistry,
        events: EventBus,
        config: ExperimentConfig,
        *,
        on_scored: Callable[[Trajectory], None],
        restart: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """`on_scored` gets each trajectory with a reward, or with an error; `restart(name, reason)` replaces a worker."""
        self._registry = registry
        self._events = events
        self._reward_timeout_s = config.reward.timeout_s
        self._fetch_timeout_s = config.controller.start_timeout_s
        self._on_scored = on_scored
        self._restart = restart
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self.pending_scores = 0
        self._started = False  # all workers were ready once
        registry.on_lost("environment", self._on_lost)

    async def fetch_prompts(self, start: int, count: int) -> messages.PromptsFetched:
        """Prompts at these positions. Raises RunFailed if no worker can answer."""
        result: asyncio.Future[messages.PromptsFetched] = asyncio.get_running_loop().create_future()

        def done(answer: messages.PromptsFetched | None, error: RunFailed | None) -> None:
            if result.done():
                return  # its caller has gone
            if error is not None:
                result.set_exception(error)
            elif answer is not None:
                result.set_result(answer)

        self._calls.put_nowait(
            _Call(
                message=messages.FetchPrompts(start=start, count=count),
                answer=messages.PromptsFetched,
                matches=lambda fetched: fetched.start == start,
                limit_s=self._fetch_timeout_s,
                attempts_left=FETCH_ATTEMPTS,
                wanted=lambda: not result.done(),
                done=done,
            )
        )
        return await result

    def submit(self, trajectory: Trajectory) -> None:
        """Queue a finished trajectory for its reward."""
        self.pending_scores += 1
        prompt, trajectory_id = trajectory.prompt, trajectory.trajectory_id
        self._calls.put_nowait(
            _Call(
                message=messages.ScoreTrajectory(
                    trajectory_id=trajectory_id,
                    source=prompt.source,
                    prompt_text=prompt.text,
                    answer=prompt.answer,
                    metadata=prompt.metadata,
                    token_ids=trajectory.response_token_ids(),
                ),
                answer=messages.TrajectoryScored,
                matches=lambda scored: scored.trajectory_id == trajectory_id,
                limit_s=self._reward_timeout_s,
                attempts_left=SCORE_ATTEMPTS,
                wanted=lambda: trajectory.state is TrajectoryState.FINISHED,
                done=lambda answer, error: self._scored(trajectory, answer, error),
            )
        )

    async def work_forever(self, name: str) -> None:
        """Serve calls with the worker of this name, over its replacements too.

        Consumes the queue of calls, waits for the worker's answers, unblocks whoever made the call.
        """
        self._started = True
        while True:
            call = await self._calls.get()
            if not call.wanted():
                call.done(None, None)
                continue
            if name not in self._registry.workers:
                self._calls.put_nowait(call)
                await self._replace_worker(name, "it is not connected")
                continue
            call.attempts_left -= 1
            try:
                answer = await self._registry.ask(name, call.message, call.answer, call.limit_s, matches=call.matches)
            except WorkerLost as error:
                if call.attempts_left:
                    self._calls.put_nowait(call)
                else:
                    call.done(None, RunFailed(f"{error} (no attempt left)"))
                await self._replace_worker(name, str(error))
            except RunFailed as error:
                call.done(None, error)
                self._registry.lost(name, str(error))
                await self._replace_worker(name, str(error))
            else:
                call.done(answer, None)

    async def _replace_worker(self, name: str, reason: str) -> None:
        for attempt in range(REPLACE_ATTEMPTS):
            self._events.emit(WorkerReplaced(worker=name, reason=reason))
            self._events.emit(Notice(level="warning", text=f"{name} is replaced: {reason}"))
            await self._restart(name, reason)
            try:
                await self._registry.wait_until_ready(self._fetch_timeout_s, [name])
                return
            except WorkerLost as error:
                if attempt == REPLACE_ATTEMPTS - 1:
                    raise
                reason = str(error)

    def _scored(
        self, trajectory: Trajectory, answer: messages.TrajectoryScored | None, error: RunFailed | None
    ) -> None:
        self.pending_scores -= 1
        if trajectory.state is not TrajectoryState.FINISHED:
            return  # its group was dropped meanwhile
        if answer is None:
            trajectory.error = f"no reward for trajectory {trajectory.trajectory_id}: {error} (reward.timeout_s)"
        elif answer.error:
            trajectory.error = answer.error
        elif not math.isfinite(answer.reward):
            trajectory.error = f"the reward of trajectory {trajectory.trajectory_id} is {answer.reward}"
        else:
            trajectory.reward = answer.reward
        trajectory.move_to(TrajectoryState.FAILED if trajectory.error else TrajectoryState.SCORED)
        if answer is not None and not trajectory.error:
            self._events.emit(TrajectoryScored(trajectory=trajectory, response_text=answer.response_text))
        self._on_scored(trajectory)

    def _on_lost(self, worker: Worker, reason: str) -> None:
        """Its coroutine in `work_forever` notices at its next call; but one that never got ready ends the run."""
        if not worker.ready and not self._started:
            raise WorkerLost(f"{worker.name} did not start: {reason}")

"""Calls of environment workers: prompts and rewards. One call at a time per worker, each with a limit.

Invariant: every finished trajectory leaves here once, with a reward or with a reason. A worker that dies or exceeds the
limit is replaced; its call is made once more elsewhere if the worker died, and failed if the user's code hung.
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

ATTEMPTS = 2


@dataclass(kw_only=True, slots=True)
class _Call:
    message: object
    answer: type
    limit_s: float
    result: asyncio.Future[Any]
    attempts: int = 0


class EnvironmentManager:
    """A queue of calls, and one coroutine per environment worker that works through it."""

    def __init__(
        self,
        registry: WorkerRegistry,
        events: EventBus,
        config: ExperimentConfig,
        *,
        replace: Callable[[int, str], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._events = events
        self._reward_timeout_s = config.reward.timeout_s
        self._fetch_timeout_s = config.controller.start_timeout_s
        self._replace = replace
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._finished: asyncio.Queue[Trajectory] = asyncio.Queue()
        self.pending_scores = 0
        registry.on_lost("environment", self._on_lost)

    async def fetch_prompts(self, start: int, count: int) -> messages.PromptsFetched:
        """Prompts at these positions. Raises RunFailed if no worker can answer."""
        answer: messages.PromptsFetched = await self._call(
            messages.FetchPrompts(start=start, count=count), messages.PromptsFetched, self._fetch_timeout_s
        )
        return answer

    def submit(self, trajectory: Trajectory) -> None:
        """Queue a finished trajectory for its reward."""
        self.pending_scores += 1
        self._finished.put_nowait(trajectory)

    async def score_forever(self, on_scored: Callable[[Trajectory], None]) -> None:
        """Score what was submitted; `on_scored` gets each trajectory with a reward, or with an error."""
        async with asyncio.TaskGroup() as group:
            while True:
                trajectory = await self._finished.get()
                group.create_task(self._score(trajectory, on_scored), name=f"score {trajectory.trajectory_id}")

    async def work_forever(self, name: str) -> None:
        """Serve calls with the worker of this name, over its replacements too.

        Consumes the queue of calls, waits for the worker's answers, unblocks whoever made the call.
        """
        while True:
            call = await self._calls.get()
            if call.result.done():  # its caller has gone
                continue
            call.attempts += 1
            try:
                answer = await self._registry.ask(name, call.message, call.answer, call.limit_s)
            except WorkerLost as error:
                if call.attempts < ATTEMPTS:
                    self._calls.put_nowait(call)
                elif not call.result.done():
                    call.result.set_exception(RunFailed(f"{error} ({call.attempts} attempts)"))
                await self._replace_worker(name, str(error))
            except RunFailed as error:
                if not call.result.done():
                    call.result.set_exception(error)
                self._registry.lost(name, str(error))
                await self._replace_worker(name, str(error))
            else:
                if not call.result.done():
                    call.result.set_result(answer)

    async def _replace_worker(self, name: str, reason: str) -> None:
        self._events.emit(WorkerReplaced(worker=name, reason=reason))
        self._events.emit(Notice(level="warning", text=f"{name} is replaced: {reason}"))
        await self._replace(int(name.rpartition("-")[2]), reason)
        await self._registry.wait_until_ready(self._fetch_timeout_s)

    async def _call(self, message: object, answer: type, limit_s: float) -> Any:
        call = _Call(message=message, answer=answer, limit_s=limit_s, result=asyncio.get_running_loop().create_future())
        self._calls.put_nowait(call)
        return await call.result

    async def _score(self, trajectory: Trajectory, on_scored: Callable[[Trajectory], None]) -> None:
        prompt = trajectory.prompt
        message = messages.ScoreTrajectory(
            trajectory_id=trajectory.trajectory_id,
            source=prompt.source,
            prompt_text=prompt.text,
            answer=prompt.answer,
            metadata=prompt.metadata,
            token_ids=trajectory.response_token_ids(),
        )
        text = ""
        try:
            answer = await self._call(message, messages.TrajectoryScored, self._reward_timeout_s)
        except RunFailed as error:
            trajectory.error = f"no reward for trajectory {trajectory.trajectory_id}: {error} (reward.timeout_s)"
        else:
            text = answer.response_text
            if answer.error:
                trajectory.error = answer.error
            elif not math.isfinite(answer.reward):
                trajectory.error = f"the reward of trajectory {trajectory.trajectory_id} is {answer.reward}"
            else:
                trajectory.reward = answer.reward
        self.pending_scores -= 1
        if trajectory.state is not TrajectoryState.FINISHED:
            return  # its group was dropped meanwhile
        trajectory.move_to(TrajectoryState.FAILED if trajectory.error else TrajectoryState.SCORED)
        if not trajectory.error:
            self._events.emit(TrajectoryScored(trajectory=trajectory, response_text=text))
        on_scored(trajectory)

    def _on_lost(self, worker: Worker, reason: str) -> None:
        """Its coroutine in `work_forever` notices at its next call; but one that never got ready ends the run."""
        if not worker.ready:
            raise WorkerLost(f"{worker.name} did not start: {reason}")

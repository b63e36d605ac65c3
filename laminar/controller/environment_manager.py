"""Calls of environment workers: prompts, turns and rewards. One call at a time per worker, each with a limit.

  submit, step, fetch_prompts --> [ queue of calls ] --> idle workers --> answers, each handed to whoever made the call

Invariant: every finished trajectory leaves here once, with a reward or with a reason, unless its group was dropped
meanwhile. A worker that dies or exceeds the limit is replaced; its call is made once more elsewhere if the worker died,
and failed if the user's code hung. Nothing here is a task or a timer per call: there are thousands in a step.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from laminar.config.schema import ExperimentConfig
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import EventBus, Notice, TrajectoryScored, WorkerReplaced
from laminar.protocol import messages
from laminar.trajectory import Trajectory, TrajectoryState

SCORE_ATTEMPTS = 2  # the user's code may be what kills the worker
FETCH_ATTEMPTS = 5
LONGEST_WATCH_S = 1.0  # between two looks; so much later than its limit a call is failed at most
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
    deadline: float = 0.0  # on the controller's clock


class EnvironmentManager:
    """A queue of calls, and the workers that work through it."""

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
        self._step_timeout_s = config.environment.step_timeout_s
        self._on_scored = on_scored
        self._restart = restart
        self._calls: deque[_Call] = deque()
        self._idle: deque[str] = deque()
        self._busy: dict[str, _Call] = {}
        self._replacing: dict[str, None] = {}
        self._replacements: asyncio.TaskGroup | None = None  # there once the run has begun
        self._due = asyncio.Event()
        self._now = asyncio.get_running_loop().time
        self.pending_scores = 0
        registry.handle(messages.TrajectoryScored, self._on_answer)
        registry.handle(messages.PromptsFetched, self._on_answer)
        registry.handle(messages.EnvironmentStepped, self._on_answer)
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

        self._queue(
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

    def _queue(self, call: _Call) -> None:
        self._calls.append(call)
        self._due.set()

    def submit(self, trajectory: Trajectory) -> None:
        """Queue a finished trajectory for its reward."""
        self.pending_scores += 1
        prompt, trajectory_id = trajectory.prompt, trajectory.trajectory_id
        turn_start, turn_end = trajectory.last_turn
        self._queue(
            _Call(
                message=messages.ScoreTrajectory(
                    trajectory_id=trajectory_id,
                    source=prompt.source,
                    prompt_text=prompt.text,
                    answer=prompt.answer,
                    metadata=prompt.metadata,
                    token_ids=trajectory.response_token_ids(),
                    turn_start=turn_start,
                    turn_end=turn_end,
                ),
                answer=messages.TrajectoryScored,
                matches=lambda scored: scored.trajectory_id == trajectory_id,
                limit_s=self._reward_timeout_s,
                attempts_left=SCORE_ATTEMPTS,
                wanted=lambda: trajectory.state is TrajectoryState.FINISHED,
                done=lambda answer, error: self._scored(trajectory, answer, error),
            )
        )

    def step(
        self,
        trajectory: Trajectory,
        done: Callable[[messages.EnvironmentStepped | None, RunFailed | None], None],
    ) -> None:
        """Queue a trajectory that has ended a turn for the environment's answer. The call is made once."""
        prompt, trajectory_id, lease = trajectory.prompt, trajectory.trajectory_id, trajectory.lease
        turns = [*((turn.start, turn.end) for turn in trajectory.turns), (trajectory.turn_start, trajectory.num_tokens)]
        self._queue(
            _Call(
                message=messages.StepEnvironment(
                    trajectory_id=trajectory_id,
                    lease=lease,
                    source=prompt.source,
                    prompt_text=prompt.text,
                    answer=prompt.answer,
                    metadata=prompt.metadata,
                    token_ids=trajectory.response_token_ids(),
                    turn_starts=np.array([start for start, _ in turns], np.int32),
                    turn_ends=np.array([end for _, end in turns], np.int32),
                ),
                answer=messages.EnvironmentStepped,
                matches=lambda stepped: stepped.trajectory_id == trajectory_id and stepped.lease == lease,
                limit_s=self._step_timeout_s,
                attempts_left=1,
                wanted=lambda: trajectory.state is TrajectoryState.ENVIRONMENT and trajectory.lease == lease,
                done=done,
            )
        )

    async def serve_forever(self) -> None:
        """Give queued calls to idle workers, and replace workers that are lost.

        Consumes the queue of calls, waits for workers to be idle, unblocks whoever made a call.
        """
        self._idle.extend(self._registry.names("environment"))
        async with asyncio.TaskGroup() as replacements:
            self._replacements = replacements
            while True:
                await self._due.wait()
                self._due.clear()
                while self._calls and self._idle:
                    call = self._calls.popleft()
                    if call.wanted():
                        await self._give(call, self._idle.popleft())
                    else:
                        call.done(None, None)

    async def watch_forever(self) -> None:
        """Fail calls that have exceeded their limit; the worker hangs in the user's code and is replaced."""
        shortest = min(self._reward_timeout_s, self._fetch_timeout_s, self._step_timeout_s)
        interval = min(shortest / 4, LONGEST_WATCH_S)
        while True:
            await asyncio.sleep(interval)
            now = self._now()
            for name, call in list(self._busy.items()):
                if now >= call.deadline:
                    del self._busy[name]
                    error = RunFailed(f"waited {call.limit_s:g} s for {call.answer.__name__} from {name}")
                    call.done(None, error)
                    self._registry.lost(name, str(error))

    async def _give(self, call: _Call, name: str) -> None:
        call.attempts_left -= 1
        call.deadline = self._now() + call.limit_s
        self._busy[name] = call
        try:
            await self._registry.send(name, call.message)
        except WorkerLost as error:
            if self._busy.get(name) is call:  # it was not there at all, so nobody has heard of its loss
                self._on_loss(name, str(error))

    def _on_answer(self, worker: Worker, message: Any) -> None:
        call = self._busy.get(worker.name)
        if call is None or not isinstance(message, call.answer) or not call.matches(message):
            return  # said twice, or too late
        del self._busy[worker.name]
        self._idle.append(worker.name)
        self._due.set()
        call.done(message, None)

    def _on_lost(self, worker: Worker, reason: str) -> None:
        """One that never got ready ends the run; else its call is made again, and the worker replaced.

        Raises:
            WorkerLost: the run has not begun.
        """
        if self._replacements is None:
            raise WorkerLost(f"{worker.name} did not start: {reason}")
        self._on_loss(worker.name, reason)

    def _on_loss(self, name: str, reason: str) -> None:
        call = self._busy.pop(name, None)
        if call is not None and call.attempts_left:
            self._calls.append(call)
        elif call is not None:
            call.done(None, RunFailed(f"{reason} (no attempt left)"))
        if name in self._idle:
            self._idle.remove(name)
        if name not in self._replacing and self._replacements is not None:
            self._replacing[name] = None
            self._replacements.create_task(self._replace_worker(name, reason), name=f"replace {name}")
        self._due.set()

    async def _replace_worker(self, name: str, reason: str) -> None:
        for attempt in range(REPLACE_ATTEMPTS):
            self._events.emit(WorkerReplaced(worker=name, reason=reason))
            self._events.emit(Notice(level="warning", text=f"{name} is replaced: {reason}"))
            await self._restart(name, reason)
            try:
                await self._registry.wait_until_ready(self._fetch_timeout_s, [name])
                break
            except WorkerLost as error:
                if attempt == REPLACE_ATTEMPTS - 1:
                    raise
                reason = str(error)
        del self._replacing[name]
        if name in self._registry.workers:
            self._idle.append(name)
            self._due.set()
        else:  # lost again before this task could go on
            self._on_loss(name, "it was lost as soon as it was ready")

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
            trajectory.reward = answer.reward + trajectory.environment_reward
        trajectory.move_to(TrajectoryState.FAILED if trajectory.error else TrajectoryState.SCORED)
        if answer is not None and not trajectory.error:
            self._events.emit(TrajectoryScored(trajectory=trajectory, response_text=answer.response_text))
        self._on_scored(trajectory)

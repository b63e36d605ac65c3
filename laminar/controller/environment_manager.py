"""Calls of environment workers: prompts, turns and rewards. Several at a time per worker, each with a limit.

  submit, step, fetch_prompts --> [ queue of calls ] --> workers with a free slot --> answers, handed to whoever made the call

Invariant: every finished trajectory leaves here once, with a reward or with a reason, unless its group was dropped
meanwhile. The worker itself keeps the reward's time limits; one that dies, or does not answer even so, is replaced, and its
calls are made again elsewhere. Which of several it was that ended the worker nobody can know, so each of them is then a
suspect, and runs alone: no trajectory pays for what another's did. Nothing here is a task or a timer per call: there are
thousands in a step.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from laminar.config.held_out import held_out
from laminar.config.schema import ExperimentConfig
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import EventBus, Notice, TrajectoryScored, WorkerReplaced
from laminar.protocol import messages
from laminar.trajectory import Trajectory, TrajectoryState

SCORE_ATTEMPTS = 2  # the user's code may be what kills the worker
FETCH_ATTEMPTS = 5
LONGEST_WATCH_S = 1.0  # between two looks; so much later than its limit a call is failed at most
ANSWER_SLACK_S = 5.0  # beyond the limits of reward and environment, which the worker keeps; then the worker is given up
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
    given_at: float = 0.0  # on the controller's clock
    suspect: bool = False  # was with others on a worker that ended: it runs alone


@dataclass(kw_only=True, slots=True)
class _Desk:
    """What one worker is doing."""

    calls: list[_Call] = field(default_factory=list)
    answered_at: float = -math.inf  # when it answered last


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
        self._score_limit_s = score_limit_s(config)
        self._fetch_timeout_s = config.controller.start_timeout_s
        self._step_limit_s = config.environment.step_timeout_s + ANSWER_SLACK_S
        self._invalid_is_zero = config.reward.on_invalid == "zero"
        self._slots = config.reward.calls_per_worker
        self._on_scored = on_scored
        self._restart = restart
        self._calls: deque[_Call] = deque()
        self._suspects: deque[_Call] = deque()
        self._desks: dict[str, _Desk] = {}  # workers that can take calls, or have some
        self._free: deque[str] = deque()  # a worker's name for each of its free slots
        self._replacing: dict[str, None] = {}
        self._awaited: Sequence[str] = ()  # workers that an earlier controller knew
        self._patience_s: Callable[[str], float] = lambda name: 0.0  # for them to come back
        self._replacements: asyncio.TaskGroup | None = None  # there once the run has begun
        self._due = asyncio.Event()
        self._now = asyncio.get_running_loop().time
        self.pending_scores = 0
        self.invalid_rewards = 0  # trajectories that got none
        registry.handle(messages.TrajectoryScored, self._on_answer)
        registry.handle(messages.PromptsFetched, self._on_answer)
        registry.handle(messages.EnvironmentStepped, self._on_answer)
        registry.on_lost("environment", self._on_lost)

    async def fetch_prompts(self, start: int, count: int, *, evaluation: bool = False) -> messages.PromptsFetched:
        """Prompts at these positions, of the held-out ones for an `evaluation`. Raises RunFailed if no worker can answer."""
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
                message=messages.FetchPrompts(start=start, count=count, evaluation=evaluation),
                answer=messages.PromptsFetched,
                matches=lambda fetched: fetched.start == start and fetched.evaluation == evaluation,
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
                    evaluation=trajectory.evaluation is not None,
                ),
                answer=messages.TrajectoryScored,
                matches=lambda scored: scored.trajectory_id == trajectory_id,
                limit_s=self._score_limit_s,
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
                    evaluation=trajectory.evaluation is not None,
                ),
                answer=messages.EnvironmentStepped,
                matches=lambda stepped: stepped.trajectory_id == trajectory_id and stepped.lease == lease,
                limit_s=self._step_limit_s,
                attempts_left=1,
                wanted=lambda: trajectory.state is TrajectoryState.ENVIRONMENT and trajectory.lease == lease,
                done=done,
            )
        )

    async def serve_forever(self) -> None:
        """Give queued calls to workers with a free slot, and replace workers that are lost.

        Consumes the queue of calls, waits for free slots, unblocks whoever made a call.
        """
        for name in self._registry.names("environment"):
            if name not in self._awaited:
                self._desks[name] = _Desk()
        for _ in range(self._slots):  # in turn, so that calls spread over the workers
            self._free.extend(self._desks)
        async with asyncio.TaskGroup() as replacements:
            self._replacements = replacements
            for name in self._awaited:
                self._replacing[name] = None
                replacements.create_task(self._await_back(name), name=f"await {name}")
            while True:
                await self._due.wait()
                self._due.clear()
                while (given := self._next()) is not None:
                    await self._give(*given)

    def _next(self) -> tuple[_Call, str] | None:
        """The call to give now, and to whom. A suspect waits for a worker that has nothing else; while there are any, one
        worker gets no other calls, so that it will be free.
        """
        for queue in (self._suspects, self._calls):
            while queue and not queue[0].wanted():
                queue.popleft().done(None, None)
        reserved = ""
        if self._suspects and self._desks:
            reserved = min(self._desks, key=lambda name: len(self._desks[name].calls))
            if not self._desks[reserved].calls:
                return self._suspects.popleft(), reserved
        for _ in range(len(self._free) if self._calls else 0):
            name = self._free.popleft()
            if name == reserved or any(call.suspect for call in self._desks[name].calls):
                self._free.append(name)
                continue
            self._free.appendleft(name)
            return self._calls.popleft(), name
        return None

    def await_back(self, names: Sequence[str], patience_s: Callable[[str], float]) -> None:
        """Before `serve_forever`: an earlier controller knew these workers; who is not back in time is replaced."""
        self._awaited, self._patience_s = names, patience_s

    async def _await_back(self, name: str) -> None:
        try:
            await self._registry.wait_until_ready(self._patience_s(name), [name])
        except (WorkerLost, RunFailed) as error:
            await self._replace_worker(name, f"it has not come back: {error}")
        else:
            self._is_back(name)

    async def watch_forever(self) -> None:
        """Give up workers that have not answered a call within its limit."""
        shortest = min(self._score_limit_s, self._fetch_timeout_s, self._step_limit_s)
        interval = min(shortest / 4, LONGEST_WATCH_S)
        while True:
            await asyncio.sleep(interval)
            now = self._now()
            for name, desk in list(self._desks.items()):
                late = next((call for call in desk.calls if now >= call.given_at + call.limit_s), None)
                if late is not None:
                    self._give_up(name, desk, late)

    def _give_up(self, name: str, desk: _Desk, late: _Call) -> None:
        """A call is late. If it is alone, or the worker still answers others, it is what hangs, and fails."""
        error = RunFailed(f"waited {late.limit_s:g} s for {late.answer.__name__} from {name}")
        if len(desk.calls) == 1 or self._now() - desk.answered_at < late.limit_s / 4:
            desk.calls.remove(late)
            late.done(None, error)
            self._call_again(desk.calls, suspect=False)
            desk.calls.clear()
        self._registry.lost(name, str(error))

    async def _give(self, call: _Call, name: str) -> None:
        call.attempts_left -= 1
        call.given_at = self._now()
        desk = self._desks[name]
        desk.calls.append(call)
        self._free.remove(name)
        try:
            await self._registry.send(name, call.message)
        except WorkerLost as error:
            if call in desk.calls:  # it was not there at all, so nobody has heard of its loss
                self._on_loss(name, str(error))

    def _on_answer(self, worker: Worker, message: Any) -> None:
        desk = self._desks.get(worker.name)
        if desk is None:
            return
        call = next((call for call in desk.calls if isinstance(message, call.answer) and call.matches(message)), None)
        if call is None:
            return  # said twice, or too late
        desk.calls.remove(call)
        desk.answered_at = self._now()
        self._free.append(worker.name)
        if self._calls or self._suspects:
            self._due.set()
        call.done(message, None)

    def _call_again(self, calls: list[_Call], *, suspect: bool) -> None:
        """These were on a worker that ended. Together with others, none of them has used up its attempts by that."""
        for call in calls:
            call.attempts_left = max(call.attempts_left, 1)
            call.suspect = call.suspect or suspect
            (self._suspects if call.suspect else self._calls).append(call)

    def _on_lost(self, worker: Worker, reason: str) -> None:
        """One that never got ready ends the run; else its call is made again, and the worker replaced.

        Raises:
            WorkerLost: the run has not begun.
        """
        if self._replacements is None:
            raise WorkerLost(f"{worker.name} did not start: {reason}")
        self._on_loss(worker.name, reason)

    def _on_loss(self, name: str, reason: str) -> None:
        desk = self._desks.pop(name, None)
        calls = desk.calls if desk is not None else []
        if len(calls) == 1 and not calls[0].attempts_left:
            calls[0].done(None, RunFailed(f"{reason} (no attempt left)"))
        else:
            self._call_again(calls, suspect=len(calls) > 1)
        self._free = deque(free for free in self._free if free != name)
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
        self._is_back(name)

    def _is_back(self, name: str) -> None:
        del self._replacing[name]
        if name in self._registry.workers:
            self._desks[name] = _Desk()
            self._free.extend([name] * self._slots)
            self._due.set()
        else:  # lost again before this task could go on
            self._on_loss(name, "it was lost as soon as it was ready")

    def _scored(
        self, trajectory: Trajectory, answer: messages.TrajectoryScored | None, error: RunFailed | None
    ) -> None:
        self.pending_scores -= 1
        if trajectory.state is not TrajectoryState.FINISHED:
            return  # its group was dropped meanwhile
        invalid: str | None = None
        if answer is None:
            invalid = f"no reward for trajectory {trajectory.trajectory_id}: {error} (reward.timeout_s)"
        elif answer.error:
            invalid = answer.error
        elif not math.isfinite(answer.reward):
            invalid = f"the reward of trajectory {trajectory.trajectory_id} is {answer.reward}"
        else:
            trajectory.reward = answer.reward + trajectory.environment_reward
            trajectory.reward_parts = answer.parts
        if invalid is not None and trajectory.evaluation is None:
            self.invalid_rewards += 1
            if self._invalid_is_zero:
                trajectory.reward, trajectory.reward_error, invalid = trajectory.environment_reward, invalid, None
        trajectory.error = invalid
        trajectory.move_to(TrajectoryState.FAILED if invalid else TrajectoryState.SCORED)
        if not invalid:
            text = "" if answer is None else answer.response_text
            self._events.emit(TrajectoryScored(trajectory=trajectory, response_text=text))
        self._on_scored(trajectory)


def score_limit_s(config: ExperimentConfig) -> float:
    """Longest wait for the score of one trajectory before its worker is given up, in seconds."""
    rewards = [config.reward] if config.evaluation is None else [config.reward, held_out(config).reward]
    return max(reward.longest_s for reward in rewards) + ANSWER_SLACK_S

"""The environments of trajectories that are under way: one each, kept between two turns, or led to where it stood.

Invariants: an environment answers a turn only after it has seen exactly the turns before it; one that takes longer than
`environment.step_timeout_s` is an answer with an error, and delays no other: coroutines interleave in the user-code thread,
plain methods are called in threads of their own. Used in the user-code thread only.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.config.user_function import in_one_line
from laminar.data.metadata import decode_metadata
from laminar.data.observation import ObservationEncoder
from laminar.environments.environment import Environment, EnvironmentPrompt, Step
from laminar.environments.registry import MakeEnvironment
from laminar.errors import UserError
from laminar.protocol.messages import EnvironmentStepped, StepEnvironment
from laminar.workers.environment.user_code import in_its_own_thread

log = logging.getLogger("laminar.environment")

CLOSE_LIMIT_S = 2.0  # beside the limit of the turn: less than the controller waits for the answer beyond that
KEPT_EPISODES = 1024  # those of dropped groups, and of trajectories that went to another worker, are among them
NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)


class BeginFailed(Exception):
    """An environment could not begin with a prompt; the message says why."""


@dataclass(slots=True)
class _Episode:
    environment: Environment
    seen: int  # checksum of the tokens up to the end of the last turn that it has answered


class Episodes:
    """Answers `StepEnvironment`."""

    def __init__(self, make: MakeEnvironment, encoder: ObservationEncoder, *, limit_s: float) -> None:
        self._make = make
        self._encoder = encoder
        self._limit_s = limit_s
        self._kept: OrderedDict[str, _Episode] = OrderedDict()

    async def first_observation(self, prompt: EnvironmentPrompt) -> str:
        """What the environment says before the first turn; part of the prompt, so the same for a group.

        Raises:
            BeginFailed: it raised, took too long, or said something that is no text.
        """
        environment: Environment | None = None
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                environment = self._make()
                said = await _result(environment.reset, prompt)
            if said is not None and not isinstance(said, str):
                raise TypeError(f"reset returned {said!r:.80} ({type(said).__name__}); expected text or None")
            return said or ""
        except BaseException as error:  # as in `step`
            if _is_cancelled(error):
                raise
            log.warning("the environment could not begin", exc_info=error)
            raise BeginFailed(self._what(error, limit)) from error
        finally:
            if environment is not None:
                await self._close(environment)

    async def step(self, message: StepEnvironment) -> EnvironmentStepped:
        """Answer a turn. Never raises what an environment raises.

        Raises:
            UserError: the model's chat template has no place for the observation.
        """
        trajectory_id, turn = message.trajectory_id, len(message.turn_starts)
        episode: _Episode | None = None
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                episode = await self._episode(message)
                step = await _answer(episode.environment, self._turn(message, turn - 1))
            observation = NO_TOKENS if step.done else self._observation(message, step)
            if step.done:
                await self._close(episode.environment)
            else:
                episode.seen = _checksum(message, turn)
                await self._keep(trajectory_id, episode)
        except BaseException as error:  # sys.exit() in user code must not end the thread
            if _is_cancelled(error) or isinstance(error, UserError):
                raise
            log.warning("trajectory %s: turn %d failed", trajectory_id, turn, exc_info=error)
            if episode is not None:
                await self._close(episode.environment)
            return _answered(message, error=self._what(error, limit))
        return _answered(message, token_ids=observation, reward=float(step.reward), done=step.done)

    async def close(self) -> None:
        """Let go of all."""
        while self._kept:
            await self._close(self._kept.popitem()[1].environment)

    def _what(self, error: BaseException, limit: asyncio.Timeout) -> str:
        """What went wrong, in a line."""
        if isinstance(error, TimeoutError) and limit.expired():
            return f"it took longer than {self._limit_s:g} s"
        return in_one_line(error)

    async def _episode(self, message: StepEnvironment) -> _Episode:
        """The environment of this trajectory, having seen all turns but the last."""
        before = len(message.turn_starts) - 1
        episode = self._kept.pop(message.trajectory_id, None)
        if episode is not None and before and episode.seen == _checksum(message, before):
            return episode
        if episode is not None:
            await self._close(episode.environment)
        episode = _Episode(self._make(), 0)
        try:
            await _result(episode.environment.reset, _prompt(message))
            for turn in range(before):
                await _answer(episode.environment, self._turn(message, turn))
        except BaseException:
            await self._close(episode.environment)
            raise
        return episode

    def _turn(self, message: StepEnvironment, turn: int) -> str:
        return self._encoder.decode(_tokens(message, turn))

    def _observation(self, message: StepEnvironment, step: Step) -> NDArray[np.int32]:
        turn = _tokens(message, len(message.turn_starts) - 1)
        return self._encoder.encode(step.observation, as_message=step.as_message, turn=turn)

    async def _keep(self, trajectory_id: str, episode: _Episode) -> None:
        self._kept[trajectory_id] = episode
        if len(self._kept) > KEPT_EPISODES:
            await self._close(self._kept.popitem(last=False)[1].environment)

    async def _close(self, environment: Environment) -> None:
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await _result(environment.close)
        except BaseException as error:  # user code; the trajectory has its answer
            if _is_cancelled(error):
                raise
            log.warning("an environment could not be closed", exc_info=error)


def _is_cancelled(error: BaseException) -> bool:
    """Whether it is this task that is to end; a cancellation of the user's own making is an error like others."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _result(method: Callable[..., Any], *args: Any) -> Any:
    """Of a coroutine function, or of a plain one, which may block."""
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    value = await in_its_own_thread(method, *args)
    return await value if inspect.isawaitable(value) else value


async def _answer(environment: Environment, response: str) -> Step:
    step = await _result(environment.step, response)
    if not isinstance(step, Step):
        raise TypeError(
            f"step returned {step!r:.80} ({type(step).__name__}); expected laminar.environments.environment.Step"
        )
    if not isinstance(step.observation, str):
        raise TypeError(
            f"the observation is {step.observation!r:.80} ({type(step.observation).__name__}); expected text"
        )
    return step


def _prompt(message: StepEnvironment) -> EnvironmentPrompt:
    return EnvironmentPrompt(
        text=message.prompt_text,
        answer=message.answer,
        metadata=decode_metadata(message.metadata),
        source=message.source,
    )


def _tokens(message: StepEnvironment, turn: int) -> NDArray[np.int32]:
    return message.token_ids[int(message.turn_starts[turn]) : int(message.turn_ends[turn])]


def _checksum(message: StepEnvironment, turns: int) -> int:
    """Of all tokens up to the end of so many turns."""
    return zlib.crc32(message.token_ids[: int(message.turn_ends[turns - 1])].tobytes())


def _answered(
    message: StepEnvironment,
    *,
    token_ids: NDArray[np.int32] = NO_TOKENS,
    reward: float = math.nan,
    done: bool = False,
    error: str = "",
) -> EnvironmentStepped:
    return EnvironmentStepped(
        trajectory_id=message.trajectory_id,
        lease=message.lease,
        token_ids=token_ids,
        reward=reward,
        done=done,
        error=error,
    )

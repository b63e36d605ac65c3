"""What a reward function is, and how one is called.

Invariant: whatever user code does (raise, return nonsense, call sys.exit), the outcome is a finite number or one line
that names the trajectory, the function and the fault.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from laminar.errors import UserError

log = logging.getLogger("laminar.reward")

RewardFunction = Callable[..., float | Awaitable[float]]
"""`def reward(*, prompt: str, response: str, answer: str, metadata: dict) -> float`, plain or async.

A function gets the arguments that it declares: any of `prompt`, `response`, `answer`, `metadata`, `source`.
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardInput:
    """What a reward may look at."""

    trajectory_id: str
    prompt: str  # the prompt's text, before template and chat template
    response: str  # what the model wrote, without special tokens
    answer: str  # expected answer; "" where there is none
    metadata: dict[str, Any]
    source: str  # data set that the prompt came from


MAX_MESSAGE = 300  # characters of an exception's message that are passed on; all of it is in the log
ARGUMENTS = ("prompt", "response", "answer", "metadata", "source")


@dataclass(kw_only=True, slots=True, frozen=True)
class Outcome:
    """A reward, or why there is none."""

    reward: float  # NaN where error is set
    error: str  # one line; "" for a finite reward


class Reward:
    """A reward function with the name that the config gives it."""

    def __init__(self, name: str, function: RewardFunction) -> None:
        """Look at the function's parameters once.

        Raises:
            UserError: it is not callable, or needs an argument that there is not.
        """
        self.name = name
        self._function = function
        self._arguments = accepted_arguments(name, function)

    async def score(self, request: RewardInput) -> Outcome:
        """Call the function; a coroutine is awaited in the running loop. Never raises what user code raises."""
        place = f"trajectory {request.trajectory_id}: reward {self.name}"
        try:
            value = self._function(**{argument: getattr(request, argument) for argument in self._arguments})
            if inspect.isawaitable(value):
                value = await value
        except BaseException as error:  # sys.exit() in user code must not end the thread that all rewards run in
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the worker is ending; a cancellation of the user's own making is an error like any other
            log.warning("%s raised", place, exc_info=error)
            return Outcome(reward=math.nan, error=f"{place} raised {in_one_line(error)}")
        number = as_number(value)
        if number is None:
            return Outcome(
                reward=math.nan, error=f"{place} returned {value!r:.80} ({type(value).__name__}); expected a number"
            )
        if not math.isfinite(number):
            return Outcome(reward=math.nan, error=f"{place} returned {number}; expected a finite number")
        return Outcome(reward=number, error="")


def accepted_arguments(name: str, function: RewardFunction) -> tuple[str, ...]:
    """Which of ARGUMENTS the function takes by keyword.

    Raises:
        UserError: it is not callable, or has a required parameter that is not among them.
    """
    if not callable(function):
        raise UserError(f"reward.function: {name} is {type(function).__name__}, not a function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # a function written in C tells nothing; let it have everything
        return ARGUMENTS
    taken: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            return ARGUMENTS
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.name in ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY:
            taken.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise UserError(
                f"reward.function: {name} needs {parameter.name!r}, but rewards are called by keyword with "
                f"{', '.join(ARGUMENTS)} (those that the function declares)"
            )
    return tuple(taken)


def as_number(value: Any) -> float | None:
    """The value as a float; None where it is not a number (text is not)."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except Exception:  # arrays of several numbers, tensors, anything: each refuses in its own way
        return None


def in_one_line(error: BaseException) -> str:
    """An exception's kind and message, and the line of code that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + '...'}{place}"

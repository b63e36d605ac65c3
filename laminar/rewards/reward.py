"""A reward function with its name, and how it is called.

Invariant: whatever user code does (raise, return nonsense, call sys.exit), the outcome is a finite number or one line
that names the trajectory, the function and the fault.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from laminar.config.user_function import in_one_line
from laminar.rewards.conventions import RewardInput, bind

log = logging.getLogger("laminar.reward")

RewardFunction = Callable[..., Any | Awaitable[Any]]
"""`def reward(*, prompt: str, response: str, answer: str, metadata: dict) -> float`, plain or async.

A function gets the arguments that it declares; `conventions.py` says which there are.
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Outcome:
    """A reward, or why there is none."""

    reward: float  # NaN where error is set
    error: str  # one line; "" for a finite reward


class Reward:
    """A reward function with the name that the config gives it."""

    def __init__(
        self,
        name: str,
        function: RewardFunction,
        *,
        params: Mapping[str, Any] | None = None,
        key: str = "reward.function",
    ) -> None:
        """Look at the function's parameters once.

        Args:
            name: for messages.
            function: plain or async.
            params: further keyword arguments, the same for every trajectory.
            key: of the configuration that names it.

        Raises:
            UserError: it is not callable, needs an argument that there is not, or does not take one of `params`.
        """
        self.name = name
        self._function = function
        self._fill = bind(key, name, function, params or {})

    @property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine."""
        return inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - an object whose call is a coroutine function
        )

    async def score(self, request: RewardInput) -> Outcome:
        """Call the function; a coroutine is awaited in the running loop. Never raises what user code raises."""
        try:
            value = self._function(**self._fill(request))
            if inspect.isawaitable(value):
                value = await value
        except BaseException as error:  # sys.exit() in user code must not end the thread that rewards run in
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the worker is ending, or the limit has passed; one of the user's own making is like any other
            return self._raised(request, error)
        return self._judged(request, value)

    def score_now(self, request: RewardInput) -> Outcome:
        """The same for a plain function, without a loop."""
        try:
            value = self._function(**self._fill(request))
            if inspect.isawaitable(value):
                value = asyncio.run(_result(value))
        except BaseException as error:  # as above
            return self._raised(request, error)
        return self._judged(request, value)

    def failed(self, request: RewardInput, what: str) -> Outcome:
        """No reward, because of `what`."""
        return Outcome(reward=math.nan, error=f"trajectory {request.trajectory_id}: reward {self.name} {what}")

    def _raised(self, request: RewardInput, error: BaseException) -> Outcome:
        log.warning("trajectory %s: reward %s raised", request.trajectory_id, self.name, exc_info=error)
        return self.failed(request, f"raised {in_one_line(error)}")

    def _judged(self, request: RewardInput, value: Any) -> Outcome:
        if isinstance(value, Mapping) and "score" in value:  # verl's functions may return details beside it
            value = value["score"]
        if isinstance(value, list | tuple):
            if len(value) != 1:
                return self.failed(
                    request,
                    f"returned {value!r:.80} ({type(value).__name__} of {len(value)}); expected one number for one response",
                )
            value = value[0]
        number = as_number(value)
        if number is None:
            return self.failed(request, f"returned {value!r:.80} ({type(value).__name__}); expected a number")
        if not math.isfinite(number):
            return self.failed(request, f"returned {number}; expected a finite number")
        return Outcome(reward=number, error="")


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def as_number(value: Any) -> float | None:
    """The value as a float; None where it is not a number (text is not)."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except Exception:  # arrays of several numbers, tensors, anything: each refuses in its own way
        return None

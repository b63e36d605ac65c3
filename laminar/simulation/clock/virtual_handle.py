"""What a loop in virtual time schedules: handles that cost little, and tasks whose sets have the same order in every process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from laminar.simulation.clock.waiting_tasks import name_of


class Handle(asyncio.TimerHandle):
    """A scheduled callback; keeps nothing in the base class, whose constructor is slow."""

    __slots__ = ("args", "callback", "context", "on_cancel", "time")

    def __init__(
        self,
        time: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self.time = time
        self.callback: Callable[..., object] | None = callback  # None: cancelled
        self.args = args
        self.context = copy_context() if context is None else context
        self.on_cancel: Callable[[], None] | None = None  # the loop's, while the handle is in its heap of timers

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<callback {name_of(self.callback)} at {self.time} s>"

    def cancel(self) -> None:
        """Never run it."""
        if self.callback is not None:
            self.callback = None
            self.args = ()
            if self.on_cancel is not None:
                self.on_cancel()

    def cancelled(self) -> bool:
        """Whether it will never run because of `cancel`."""
        return self.callback is None

    def when(self) -> float:
        """The time for which it was scheduled, virtual seconds."""
        return self.time


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks have the same order in every process."""

    def __init__(self, number: int, coro: Any, loop: asyncio.AbstractEventLoop, context: Context | None) -> None:
        self.number = number  # first: the base class puts the task into a set
        super().__init__(coro, loop=loop, name=f"Task-{number}", context=context)

    __eq__ = object.__eq__

    def __hash__(self) -> int:
        return self.number

"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it.

Invariants: callbacks run in the order in which they were scheduled, timers in order of their time and, at equal times, of
their scheduling; the order of tasks in a set (asyncio.TaskGroup cancels by iterating over one) is that of their creation.
So the same code does the same in every process. Nothing waits for ever and no task dies unseen: see
`run_in_virtual_time` for what is raised.

Built as the standard library's guide "Extending asyncio" says: on BaseEventLoop, which brings futures, tasks and
`run_until_complete`. Ours are the queue, the heap of timers and the handles: the stock handles are compared in python at
each step of the heap, which halves the speed.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

from laminar.simulation.clock.real_world import NoRealWorld
from laminar.simulation.clock.task_register import TaskRegister
from laminar.simulation.clock.virtual_handle import Handle, NumberedTask
from laminar.simulation.clock.virtual_time_errors import (
    Deadlock,
    Livelock,
    RealWorldRefused,
    TaskDied,
    VirtualTimeError,
    VirtualTimeLimit,
)
from laminar.simulation.clock.waiting_tasks import name_of

__all__ = [
    "Deadlock",
    "Livelock",
    "RealWorldRefused",
    "TaskDied",
    "VirtualTimeError",
    "VirtualTimeLimit",
    "VirtualTimeLoop",
    "run_in_virtual_time",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CALLBACKS_PER_INSTANT = 5_000_000  # more than any real burst; code that never lets the time pass gets there in seconds
CLEAN_UP_LIMIT_S = 60.0  # virtual seconds that cancelled tasks get to end
MIN_CANCELLED = 100  # cancelled timers that are not worth tidying up


class VirtualTimeLoop(NoRealWorld, asyncio.BaseEventLoop):
    """The loop; `run_in_virtual_time` is how it is used."""

    def __init__(self, *, limit_s: float = math.inf) -> None:
        """
        Args:
            limit_s: time at which the run is ended by `VirtualTimeLimit`; the clock starts at 0.
        """
        self._is_running = False
        super().__init__()
        self.limit_s = limit_s
        self.callbacks_run = 0  # up to the end of the last round of ready callbacks; cancelled ones are counted too
        self._now = 0.0
        self._ready_handles: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []  # a heap; the number puts equal times in order
        self._numbers = count(1)
        self._cancelled_timers = 0
        self._on_cancel = self._note_cancelled_timer
        self._stop_asked = False
        self._thread = threading.get_ident()
        self.tasks = TaskRegister()
        self._generators: weakref.WeakValueDictionary[int, AsyncGenerator[Any, Any]] = weakref.WeakValueDictionary()
        self.set_task_factory(self._make_task)

    # ------------------------------------------------------------ scheduling

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run at this instant, after what is ready already."""
        handle = Handle(self._now, callback, args, context)
        self._ready_handles.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run `delay` seconds from now."""
        when = self._now + delay
        if not delay > 0:
            return self.call_at(when, callback, *args, context=context)
        handle = Handle(when, callback, args, context)  # as call_at does, without the cost of the call
        handle.on_cancel = self._on_cancel
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run at this time; where that is now or past, after what is ready already."""
        handle = Handle(when, callback, args, context)
        if when > self._now:
            handle.on_cancel = self._on_cancel
            heapq.heappush(self._timers, (when, next(self._numbers), handle))
        elif when <= self._now:
            self._ready_handles.append(handle)
        else:
            raise ValueError(f"a timer at {when} s")
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`; refused from other threads, whose timing nothing could repeat."""
        if threading.get_ident() != self._thread:
            raise RealWorldRefused("call_soon_threadsafe from another thread: virtual time does not wait for threads")
        return self.call_soon(callback, *args, context=context)

    def _note_cancelled_timer(self) -> None:
        """Drop cancelled timers once they are more than half of the heap."""
        self._cancelled_timers += 1
        if self._cancelled_timers > MIN_CANCELLED and self._cancelled_timers * 2 > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    # ------------------------------------------------------------ running

    def is_running(self) -> bool:
        """Whether `run_forever` is at work."""
        return self._is_running

    def stop(self) -> None:
        """Leave `run_forever` after the callbacks that are ready now."""
        self._stop_asked = True

    def run_forever(self) -> None:
        """Run until `stop`; called by `run_until_complete`, which checks that it may.

        Raises:
            Deadlock, VirtualTimeLimit, Livelock, TaskDied: see `run_in_virtual_time`.
        """
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generator_started, finalizer=self._generator_dropped)
        asyncio._set_running_loop(self)
        self._is_running = True
        try:
            self._run_until_stop()
        finally:
            self._is_running = False
            self._stop_asked = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _run_until_stop(self) -> None:
        """All ready callbacks, then the next timers, and again. One function with locals: this is the hot path."""
        ready, timers = self._ready_handles, self._timers
        while True:
            stuck_at = self.callbacks_run + CALLBACKS_PER_INSTANT
            while ready:
                todo = len(ready)
                for _ in range(todo):
                    handle = ready.popleft()
                    callback = handle.callback
                    if callback is None:
                        continue
                    try:
                        handle.context.run(callback, *handle.args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        # As the stock handles do: a callback's failure belongs to nobody who could be told.
                        message = f"callback {name_of(callback)}"
                        self.call_exception_handler({"message": message, "exception": error})
                self.callbacks_run += todo
                if self._stop_asked:
                    if self.tasks.failures:
                        raise self.tasks.take_failures()
                    return
                if self.callbacks_run > stuck_at:
                    raise Livelock(f"more than {CALLBACKS_PER_INSTANT} callbacks and no end {self._state()}")
            if not timers:
                raise Deadlock(f"nothing can happen any more: no callback is ready and no timer is set {self._state()}")
            when, _, handle = timers[0]
            if handle.callback is None:
                heapq.heappop(timers)
                continue
            if when > self.limit_s:
                raise VirtualTimeLimit(f"not done within {self.limit_s:.6g} s {self._state()}")
            self._now = when
            while timers and timers[0][0] == when:
                handle = heapq.heappop(timers)[2]
                handle.on_cancel = None
                ready.append(handle)

    def _state(self) -> str:
        return f"at t = {self._now:.6g} s; {self.tasks.describe()}"

    # ------------------------------------------------------------ tasks and their ends

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None) -> NumberedTask:
        task = NumberedTask(next(self._numbers), coro, loop, context)
        self.tasks.add(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run with TaskDied: asyncio calls this where there is nobody to raise to."""
        if self.is_closed():
            super().call_exception_handler(context)
            return
        self.tasks.failures.append((context["message"], context.get("exception")))
        self.stop()

    async def cancel_all(self) -> None:
        """Cancel all other tasks, wait for their ends, and close asynchronous generators."""
        this = asyncio.current_task()
        while others := [task for task in self.tasks.live if task is not this]:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        await self.shutdown_asyncgens()

    def _generator_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators[next(self._numbers)] = generator

    def _generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self.is_closed():
            self.create_task(generator.aclose(), name=f"close {name_of(generator)}")  # type: ignore[arg-type]

    async def shutdown_asyncgens(self) -> None:
        """Close those that were left open, in order of their start."""
        for generator in list(self._generators.values()):
            await generator.aclose()


def run_in_virtual_time(main: Coroutine[Any, Any, T], *, limit_s: float) -> T:
    """Run a coroutine on a new loop in virtual time; then cancel what is left, and close the loop.

    Args:
        main: what to run; inside it `asyncio.get_running_loop()` is the `VirtualTimeLoop`.
        limit_s: virtual seconds that it may take.

    Raises:
        Deadlock: main waits for what can never happen.
        VirtualTimeLimit: main is not done at `limit_s`.
        Livelock: more than CALLBACKS_PER_INSTANT callbacks while the clock stands still.
        TaskDied: a callback failed, or main is done (or stuck) and a task has failed whose exception nobody has taken.
            A callback's failure ends the run at once.
        RuntimeError: a loop is running in this thread.
        Exception: what main raised.
    """
    if asyncio._get_running_loop() is not None:
        main.close()
        raise RuntimeError("run_in_virtual_time makes a loop of its own; it cannot be called inside another")
    loop = VirtualTimeLoop(limit_s=limit_s)
    try:
        try:
            result = loop.run_until_complete(main)
        except BaseException as error:
            died = loop.tasks.take_unseen()
            _clean_up(loop, error)
            if died is None:
                raise
            if not isinstance(error, Deadlock | VirtualTimeLimit | Livelock):
                error.add_note(f"Besides: {died}")
                raise
            died.add_note(f"After that: {error}")
            raise died from died.__cause__
        _clean_up(loop, None)
        if died := loop.tasks.take_unseen():
            raise died
        return result
    finally:
        loop.close()


def _clean_up(loop: VirtualTimeLoop, error: BaseException | None) -> None:
    """End all tasks. What goes wrong there is raised, or noted on the error that there is already."""
    loop.limit_s = loop.time() + CLEAN_UP_LIMIT_S
    try:
        loop.run_until_complete(loop.cancel_all())
    except VirtualTimeError as second:
        if error is None:
            raise
        error.add_note(f"While its tasks were cancelled: {second}")
    if error is not None:
        loop.tasks.take_unseen()  # of tasks that were cancelled because of the error

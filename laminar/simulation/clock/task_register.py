"""The tasks of a loop in virtual time: which are pending, and which have failed without anybody's knowing."""

from __future__ import annotations

import asyncio
from typing import Any

from laminar.simulation.clock.virtual_time_errors import TaskDied
from laminar.simulation.clock.waiting_tasks import describe_tasks


class TaskRegister:
    """Pending tasks in order of their creation; and failures that nobody has been told of."""

    def __init__(self) -> None:
        self.live: dict[asyncio.Task[Any], None] = {}
        self.failures: list[tuple[str, BaseException | None]] = []  # who failed outside of any task, and of what
        self._failed: list[asyncio.Task[Any]] = []  # nobody had taken their exception when they ended

    def add(self, task: asyncio.Task[Any]) -> None:
        """Follow a task from its creation to its end."""
        self.live[task] = None
        task.add_done_callback(self._done)

    def describe(self) -> str:
        """Every pending task, with where it is and what it awaits."""
        return describe_tasks(self.live)

    def take_failures(self) -> TaskDied:
        """`failures` as one error."""
        lines = [f"{who}: {type(error).__name__}: {error}" if error else who for who, error in self.failures]
        died = TaskDied("failed, and nobody awaits it: " + "; ".join(lines))
        died.__cause__ = next((error for _, error in self.failures if error is not None), None)
        self.failures = []
        return died

    def take_unseen(self) -> TaskDied | None:
        """`failures`, and what tasks have ended with that nobody has asked for until now, as one error."""
        unseen = [task for task in self._failed if _unseen(task)]
        self.failures += [(f"task {task.get_name()!r}", task.exception()) for task in unseen]
        self._failed = []
        return self.take_failures() if self.failures else None

    def _done(self, task: asyncio.Task[Any]) -> None:
        del self.live[task]
        if _unseen(task):
            self._failed = [*filter(_unseen, self._failed), task]


def _unseen(task: asyncio.Task[Any]) -> bool:
    """Whether the task has failed and nobody has taken its exception: the flag behind asyncio's own message."""
    return task._log_traceback

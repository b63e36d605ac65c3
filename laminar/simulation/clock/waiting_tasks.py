"""What pending tasks wait for, as text: read from their suspended coroutines, without addresses, so the same in every run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import CoroutineType, FrameType, GeneratorType
from typing import Any

_ASYNCIO = str(Path(asyncio.__file__).parent)


def describe_tasks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """A line for each task: its name, its innermost frame outside asyncio, and what it awaits."""
    lines = [f"  {task.get_name()}: {_position(task)}" for task in tasks]
    return "\n".join([f"{len(lines)} pending task{'' if len(lines) == 1 else 's'}{':' if lines else ''}", *lines])


def name_of(thing: object) -> str:
    """Qualified name of a function or coroutine, or of the type of anything else."""
    return str(getattr(thing, "__qualname__", None) or type(thing).__qualname__)


def _position(task: asyncio.Task[Any]) -> str:
    """Innermost frame outside asyncio, and what it awaits."""
    frames, innermost = _frames(task.get_coro())
    if not frames:
        return "not started"
    own = [k for k, (frame, _) in enumerate(frames) if not frame.f_code.co_filename.startswith(_ASYNCIO)]
    at = own[-1] if own else 0
    frame, name = frames[at]
    waiter: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
    if at + 1 < len(frames):
        inner, awaited = frames[at + 1]
        awaited += f" (asyncio/{Path(inner.f_code.co_filename).name}:{inner.f_lineno})"
    elif isinstance(waiter, asyncio.Task):
        awaited = f"task {waiter.get_name()!r}"
    else:
        awaited = name_of(waiter if waiter is not None else innermost)
    file = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"{file}:{frame.f_lineno} {name}, awaits {awaited}"


def _frames(awaited: object) -> tuple[list[tuple[FrameType, str]], object]:
    """Frames of a suspended coroutine, outermost first, each with its name; and what the last one awaits."""
    frames: list[tuple[FrameType, str]] = []
    while True:
        if isinstance(awaited, CoroutineType):
            frame, inner = awaited.cr_frame, awaited.cr_await
        elif isinstance(awaited, GeneratorType):
            frame, inner = awaited.gi_frame, awaited.gi_yieldfrom
        else:
            return frames, awaited
        if frame is None:
            return frames, awaited
        frames.append((frame, awaited.__qualname__))
        awaited = inner

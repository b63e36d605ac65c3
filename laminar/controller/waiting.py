"""Waits that have a limit and say what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from laminar.errors import RunFailed

T = TypeVar("T")


async def within(limit_s: float, what: str, awaitable: Awaitable[T]) -> T:
    """Await, for `limit_s` seconds at most.

    Raises:
        RunFailed: the limit passed; the message says what was waited for.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await awaitable
    except TimeoutError:
        if not limit.expired():
            raise
        raise RunFailed(f"waited {limit_s:g} s for {what}") from None


def discard(future: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more: cancel it, or take note of its exception, which asyncio would else report."""
    if not future.cancel() and not future.cancelled():
        future.exception()

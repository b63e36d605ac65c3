from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from laminar.rewards.batching import Batcher


async def test_what_comes_while_a_batch_is_computed_goes_together_in_the_next() -> None:
    started, gate = threading.Event(), threading.Event()
    batches: list[list[int]] = []

    def compute(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        if items == [0]:
            started.set()
            gate.wait(30)
        return [item * item for item in items]

    batcher: Batcher[int, int] = Batcher(compute, max_batch=4)
    first = asyncio.create_task(batcher.call(0))
    await asyncio.to_thread(started.wait, 30)
    rest = [asyncio.create_task(batcher.call(number)) for number in range(1, 7)]
    gone = asyncio.create_task(batcher.call(99))
    await asyncio.sleep(0)
    gone.cancel()
    gate.set()
    assert await asyncio.gather(first, *rest) == [0, 1, 4, 9, 16, 25, 36]
    assert batches == [[0], [1, 2, 3, 4], [5, 6]]
    assert batcher.batches == [1, 4, 2]


async def test_the_error_of_one_is_not_the_error_of_its_batch() -> None:
    def compute(items: Sequence[int]) -> list[float]:
        return [1 / item for item in items]

    batcher: Batcher[int, float] = Batcher(compute, max_batch=8)
    results = await asyncio.gather(*(batcher.call(number) for number in (1, 0, 2)), return_exceptions=True)
    assert results[0::2] == [1.0, 0.5]
    with pytest.raises(ZeroDivisionError):
        raise results[1]

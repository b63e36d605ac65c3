"""The job that `weights_peers.py` measures: one process holds so many MiB, and all others are to hold them.

Invariant: every round carries other bytes, and every receiver checks all of them, after the clock has stopped; a way that does
not carry them is an error and never a time.
"""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Semaphore
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

MIB = 1 << 20
LIMIT_S = 300.0  # for one length

Words = NDArray[np.uint64]
Transfer = Callable[[], Words]
"""This process's part in one round; a receiver's returns the memory that holds the bytes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Place:
    """Where a process stands in the job; the source is 0."""

    index: int
    length: int  # processes, the source included
    folder: Path  # for sockets and files
    ready: tuple[Semaphore, ...]  # of each receiver: released by the source when there is something to fetch

    def tell_receivers(self) -> None:
        """Release all semaphores once."""
        for semaphore in self.ready:
            semaphore.release()

    def wait_for_source(self) -> None:
        """Block until the source has told once more. Raises TimeoutError."""
        if not self.ready[self.index - 1].acquire(timeout=LIMIT_S):
            raise TimeoutError(f"receiver {self.index}: nothing from the source within {LIMIT_S:g} s")


Way = Callable[[Place, Words], Transfer]
"""Connects a process; the words are the source's bytes, or a receiver's memory for them."""


def measure(name: str, way: Way, length: int, mib: int, repeats: int, folder: Path) -> float:
    """Median seconds of one way: `length` processes, the source included; `folder` is for its sockets and files.

    Raises:
        RuntimeError: one of the processes failed, died, or does not hold the bytes.
    """
    context = multiprocessing.get_context("spawn")
    meeting = context.Barrier(length)
    answers: Queue[tuple[int, float, float] | str] = context.Queue()
    ready = tuple(context.Semaphore(0) for _ in range(length - 1))
    processes: list[SpawnProcess] = []
    with tempfile.TemporaryDirectory(prefix=f"{length}-", dir=folder) as own:
        for index in range(length):
            place = Place(index=index, length=length, folder=Path(own), ready=ready)
            arguments = (name, way, place, mib, repeats, meeting, answers)
            processes.append(context.Process(target=_take_part, args=arguments, name=f"{name}-{index}", daemon=True))
        try:
            for process in processes:
                process.start()
            said = [_next(answers, processes) for _ in range(length * (repeats + 1))]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    rounds: list[list[tuple[float, float]]] = [[] for _ in range(repeats + 1)]
    for round_, arrived, ended in said:
        rounds[round_].append((arrived, ended))
    # The barrier opens when the last one arrives. The source has no end: -inf.
    return median(max(e for _, e in times) - max(a for a, _ in times) for times in rounds[1:])


def _next(answers: Queue[tuple[int, float, float] | str], processes: list[SpawnProcess]) -> tuple[int, float, float]:
    """The next answer. Raises RuntimeError when there will be none."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        dead = [
            process for process in processes if process.exitcode
        ]  # looked at first: its last words may be on the way
        try:
            answer = answers.get(timeout=1.0)
        except queue.Empty:
            if dead:
                raise RuntimeError(f"{dead[0].name} ended with {dead[0].exitcode}") from None
            if time.monotonic() > deadline:
                names = ", ".join(process.name for process in processes)
                raise RuntimeError(f"no word of {names} within {LIMIT_S:g} s") from None
            continue
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _take_part(
    name: str,
    way: Way,
    place: Place,
    mib: int,
    repeats: int,
    meeting: Barrier,
    answers: Queue[tuple[int, float, float] | str],
) -> None:
    """One process of the job."""
    try:
        words: Words = np.zeros(mib * MIB // 8, np.uint64)
        words.fill(0)  # has every page in place
        transfer = way(place, words)
        for round_ in range(repeats + 1):
            if place.index == 0:
                for start, block in _expected(round_, len(words)):
                    words[start : start + len(block)] = block
            meeting.wait(LIMIT_S)  # the source's bytes are made up: nobody computes any more
            arrived = time.monotonic()
            meeting.wait(LIMIT_S)
            held = transfer()
            ended = time.monotonic() if place.index else float("-inf")
            if any((held[start : start + len(block)] != block).any() for start, block in _expected(round_, len(words))):
                raise RuntimeError(f"{name}-{place.index} does not hold the bytes of round {round_}")
            del held  # its memory, where that is another than `words`, before the next round takes as much
            answers.put((round_, arrived, ended))
            meeting.wait(LIMIT_S)  # what still is on its way is not written over, and nobody leaves whom another needs
    except Exception:  # told to the parent, which ends all
        answers.put(f"{name}-{place.index}: {traceback.format_exc()}")
        raise


def _expected(round_: int, words: int) -> Iterator[tuple[int, Words]]:
    """The bytes of a round, block by block: word i is i + round."""
    for start in range(0, words, MIB):
        yield start, np.arange(start + round_, min(start + MIB, words) + round_, dtype=np.uint64)

"""Who writes the journal: a thread of its own, so that the controller's loop never waits for a disk.

Invariants: transactions are written in the order in which they were handed over, each whole or not at all; one that cannot
be written now (a full disk) is tried again until it can, and nothing after it is written before.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from laminar.controller.journal.tables import connect

RETRY_S = 1.0  # after a transaction could not be written
END_LIMIT_S = 30.0  # for the thread to write what it has when the run ends

Statement = tuple[str, tuple[Any, ...]]


@dataclass(kw_only=True, slots=True, frozen=True)
class Transaction:
    """Statements that are written together."""

    statements: Sequence[Statement]
    durable: bool  # on the disk when it is done, not only with the operating system
    done: Callable[[], None]  # called in the controller's loop


class JournalWriter(Protocol):
    """Takes transactions and writes them, one after another."""

    def submit(self, transaction: Transaction) -> None:
        """Write it soon; never waits."""
        ...

    def close(self) -> None:
        """Write what is left and let go of the file."""
        ...


def apply(connection: sqlite3.Connection, statements: Sequence[Statement]) -> None:
    """Execute a transaction. Raises sqlite3.Error, and then nothing of it is there."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for sql, same in groupby(statements, key=lambda statement: statement[0]):
            connection.executemany(sql, [values for _, values in same])
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


class ThreadWriter:
    """Writes a file; make it inside the loop that will use it."""

    def __init__(
        self, path: Path, *, on_trouble: Callable[[str], None], on_failure: Callable[[Exception], None]
    ) -> None:
        """
        Args:
            path: of a journal.
            on_trouble: called in the loop when a transaction could not be written, and will be tried again.
            on_failure: called in the loop when what is to be written contradicts what is there: a bug.
        """
        self._loop = asyncio.get_running_loop()
        self._on_trouble, self._on_failure = on_trouble, on_failure
        self._queue: queue.SimpleQueue[Transaction | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._connection = connect(path)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def submit(self, transaction: Transaction) -> None:
        """See `JournalWriter`."""
        self._queue.put(transaction)

    def close(self) -> None:
        """See `JournalWriter`. Gives up after END_LIMIT_S."""
        self._ending.set()
        self._queue.put(None)
        self._thread.join(END_LIMIT_S)

    def _run(self) -> None:
        while (transaction := self._queue.get()) is not None:
            if not self._write(transaction):
                break
            self._tell(transaction.done)
        self._connection.close()

    def _write(self, transaction: Transaction) -> bool:
        """False when it never can be."""
        while True:
            try:
                if transaction.durable:
                    self._connection.execute("PRAGMA synchronous = FULL")
                apply(self._connection, transaction.statements)
                if transaction.durable:
                    self._connection.execute("PRAGMA synchronous = NORMAL")
                return True
            except sqlite3.OperationalError as error:  # a full disk, an input/output error
                self._tell(partial(self._on_trouble, str(error)))
                if self._ending.wait(RETRY_S):
                    return False
            except Exception as error:  # belongs to the controller's loop
                self._tell(partial(self._on_failure, error))
                return False

    def _tell(self, callback: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

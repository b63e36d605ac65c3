"""The controller's journal in virtual time: the same statements, into a database in memory, a moment after they were handed over.

Invariant: what a controller had handed over and was not written when it died is lost, as with a real one's thread.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque

from laminar.controller.journal.restore import Restored, restore
from laminar.controller.journal.tables import create_tables
from laminar.controller.journal.writer import Transaction, apply


class VirtualJournal:
    """The database of one run, and the writer of the controller that lives at the moment."""

    def __init__(self, *, write_s: float) -> None:
        """`write_s`: from a transaction's hand-over until it is written."""
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._write_s = write_s
        self._writer: VirtualWriter | None = None
        create_tables(self._connection)

    def writer(self) -> VirtualWriter:
        """For a new controller; the one before writes no more."""
        self.lose_unwritten()
        self._writer = VirtualWriter(self._connection, self._write_s)
        return self._writer

    def lose_unwritten(self) -> None:
        """The controller dies."""
        if self._writer is not None:
            self._writer.lose()

    def restore(self) -> Restored:
        """For the next controller; counts it."""
        state = restore(self._connection)
        state.life += 1
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('life', ?)", (str(state.life),))
        return state


class VirtualWriter:
    """See `JournalWriter`."""

    def __init__(self, connection: sqlite3.Connection, write_s: float) -> None:
        self._connection, self._write_s = connection, write_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Transaction] = deque()
        self._lost = False

    def submit(self, transaction: Transaction) -> None:
        """See `JournalWriter`."""
        if not self._lost:
            self._waiting.append(transaction)
            self._loop.call_later(self._write_s, self._write)

    def close(self) -> None:
        """See `JournalWriter`."""
        while self._waiting:
            self._write()

    def lose(self) -> None:
        """The process that had handed these over is gone."""
        self._lost = True
        self._waiting.clear()

    def _write(self) -> None:
        if self._waiting:
            transaction = self._waiting.popleft()
            apply(self._connection, transaction.statements)
            transaction.done()

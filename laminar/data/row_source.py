"""Prompts from the rows of a file or folder.

Invariant: each epoch is a permutation of all rows, so each is served exactly once; the permutation follows from seed and
epoch alone, so any position can be asked for at any time.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from laminar.config.data_schema import FileSource
from laminar.data.layouts import entry_of
from laminar.data.rows import Rows
from laminar.data.source import Entry, derive_seed


class RowPrompts:
    """A `PromptSource` over rows."""

    def __init__(self, config: FileSource, rows: Rows, *, seed: int, key: str) -> None:
        """Serve the rows in the order that `config` asks for.

        Args:
            config: the source.
            rows: of its file or folder.
            seed: the experiment's, where the source has none of its own.
            key: dotted key of the source, for messages.
        """
        self._config = config
        self._rows = rows
        self._key = key
        self._seed = seed if config.seed is None else config.seed
        self._permutation = lru_cache(maxsize=2)(self._permute)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @property
    def rows(self) -> Rows:
        """What the entries are made of."""
        return self._rows

    def entry(self, position: int) -> Entry:
        """The entry at a position; with `shuffle` every epoch has its own order."""
        epoch, place = divmod(position, len(self._rows))
        return self.row_entry(int(self._permutation(epoch)[place]) if self._config.shuffle else place)

    def row_entry(self, index: int) -> Entry:
        """The entry in a row of the file.

        Raises:
            UserError: the row is not one of the layout.
        """
        row = self._rows.row(index)
        return entry_of(self._config, self._rows.title, row, self._rows.where(index), self._key)

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng(derive_seed(self._seed, "epoch", epoch)).permutation(len(self._rows))

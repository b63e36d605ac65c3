"""Rows of Arrow tables: Parquet files, and what Hugging Face's `save_to_disk` wrote.

Invariant: rows are counted through all files in the order given. Parquet is decoded into memory once; the Arrow files of
`save_to_disk` are mapped, so they take no memory of their own however large they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from laminar.errors import UserError


class ArrowRows:
    """`Rows` of one or more files with the same columns."""

    def __init__(self, title: str, files: Sequence[Path], key: str) -> None:
        """Open all files.

        Args:
            title: name of the file or folder.
            files: `*.parquet`, or `*.arrow` as `save_to_disk` writes them.
            key: of the configuration that names them, for messages.

        Raises:
            UserError: a file cannot be read, its columns are not those of the first, or there are no rows.
        """
        self._title = title
        self._files = files
        self._tables = [_read(file, key) for file in files]
        self._ends = list(accumulate(table.num_rows for table in self._tables))
        first = self._tables[0].column_names
        for file, table in zip(files, self._tables, strict=True):
            if set(table.column_names) != set(first):
                raise UserError(
                    f"{key}: {file} has the columns {', '.join(table.column_names)}, but {files[0]} has {', '.join(first)}; "
                    "all files of a source must have the same"
                )
        if not self._ends[-1]:
            raise UserError(f"{key}: {title} holds no rows")

    @property
    def title(self) -> str:
        """Name of the file or folder."""
        return self._title

    @property
    def columns(self) -> list[str] | None:
        """The columns of every row."""
        return list(self._tables[0].column_names)

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> dict[str, Any]:
        """The row as Python values: text, numbers, lists, mappings."""
        file, offset = self._locate(index)
        row: dict[str, Any] = self._tables[file].slice(offset, 1).to_pylist()[0]
        return row

    def where(self, index: int) -> str:
        """File and row, counted from 1."""
        file, offset = self._locate(index)
        return f"{self._files[file]}, row {offset + 1}"

    def close(self) -> None:
        """Let go of the tables."""
        self._tables.clear()

    def _locate(self, index: int) -> tuple[int, int]:
        file = bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)


def _read(file: Path, key: str) -> Any:
    """A pyarrow Table."""
    try:
        if file.suffix == ".parquet":
            return pq.read_table(file)
        return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
    except (OSError, pa.ArrowException) as error:
        kind = "Parquet" if file.suffix == ".parquet" else "Arrow"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{key}: cannot read {file} as {kind}: {reason}") from error

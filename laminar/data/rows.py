"""What every file of prompts offers: its rows, by index.

Invariant: `row(index)` reads no more than it must, and gives the same row every time.
"""

from __future__ import annotations

from typing import Any, Protocol


class Rows(Protocol):
    """Rows of a file or folder, read when they are asked for."""

    @property
    def title(self) -> str:
        """Name of the file or folder, as rewards and logs know it."""
        ...

    @property
    def columns(self) -> list[str] | None:
        """Names of the columns; None where every row has its own keys."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """A row, counted from 0.

        Raises:
            UserError: it cannot be read.
        """
        ...

    def where(self, index: int) -> str:
        """File and line (or row) for messages."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...

"""Files that a command was told to write its result into: tried before anything runs, written when it is there."""

from __future__ import annotations

from pathlib import Path

from laminar.errors import RunFailed, UserError


def prepare(option: str, path: Path) -> None:
    """Make the folder and see that the file can be written, without touching what it holds.

    Raises:
        UserError: it cannot; names the option.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        exists = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not exists:
            path.unlink()
    except OSError as error:
        raise UserError(
            f"{option}: {path} cannot be written ({error.strerror}); give a file in a folder of yours"
        ) from None


def write(path: Path, text: str) -> None:
    """Write it. Raises RunFailed if that is no longer possible."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFailed(f"{path} could not be written: {error.strerror}") from error

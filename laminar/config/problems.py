"""Several mistakes, one message: whoever corrects a file wants to see all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

from laminar.errors import UserError


def raise_problems(subject: str, problems: Sequence[str]) -> None:
    """Do nothing without problems.

    Raises:
        UserError: one text that names the subject (a file, an experiment) and each problem on a line.
    """
    if len(problems) == 1:
        raise UserError(f"{subject}: {problems[0]}")
    if problems:
        raise UserError("\n  - ".join([f"{subject}: {len(problems)} mistakes", *problems]))

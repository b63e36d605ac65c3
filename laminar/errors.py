"""The few exceptions that cross module boundaries. Each says who has to act: the user, or us."""

from __future__ import annotations


class UserError(Exception):
    """The user's input or machine is at fault; ends the command with exit status 2 before anything is lost.

    The message names the key or file, the value, what was expected, and the remedy.
    """


class DamagedCheckpoint(UserError):
    """A checkpoint's files are not those that were written: an older one may be sound."""


class RunFailed(Exception):
    """A run that had started cannot go on (a worker died, a reward was NaN, ...); exit status 1."""


class WorkerLost(RunFailed):
    """A worker process ended or fell silent while the run needed it."""


class JournalStuck(RunFailed):
    """The disk does not take the journal, so nobody may be told of anything new."""

"""How a run in virtual time ends when it does not end well."""

from __future__ import annotations


class VirtualTimeError(Exception):
    """The simulation cannot go on."""


class Deadlock(VirtualTimeError):
    """No callback is ready, no timer is set, and what was to be run is not done. Lists what each task waits for."""


class VirtualTimeLimit(VirtualTimeError):
    """The clock would pass the limit. Lists what each task waits for."""


class Livelock(VirtualTimeError):
    """Callbacks schedule one another without end at one instant. Lists what each task waits for."""


class TaskDied(VirtualTimeError):
    """A task or callback failed, and nobody who awaits it was told. The cause is what it raised."""


class RealWorldRefused(VirtualTimeError):
    """Code under virtual time asked for a thread, a socket, a process or a signal."""

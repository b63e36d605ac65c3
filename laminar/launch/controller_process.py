"""What the controller's process asks of Python and of the operating system before it runs."""

from __future__ import annotations

import gc
import resource

from laminar.errors import UserError

SPARE_FILES = 1024  # open files besides the connections: logs, the terminal, pipes of the workers started here

# Python looks for cycles whenever so many more objects were made than freed, and after a number of young collections it
# goes through all objects. The controller holds some ten objects per trajectory in progress and makes no cycles to speak
# of: a full collection frees nothing, and stands still for the longer the more trajectories there are (docs/controller-
# speed.md). Young collections stay, and catch the cycles of exceptions and tasks soon after they were made.
YOUNG_OBJECTS = 2_000  # milliseconds for them
YOUNG_COLLECTIONS = 4  # before one of those that survived them, too
MIDDLE_COLLECTIONS = 10_000  # before a full one: 80 million objects


def prepare(workers: int) -> None:
    """Let this process be the controller of so many workers.

    Raises:
        UserError: the machine does not let a process have a connection to each.
    """
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS)
    _allow_files(workers)


def _allow_files(workers: int) -> None:
    """Raise the limit of open files as far as needed: each worker's connection is one.

    Not to the very end: processes inherit it, and some close every number up to the limit before they start another.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = workers + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        if hard < workers + SPARE_FILES // 8:
            raise UserError(
                f"rollout.replicas: {workers} workers take a connection each, and a process may have {hard} files open "
                "(ulimit -Hn). Raise that limit, or set rollout.replicas or reward.workers lower"
            )
        wanted = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

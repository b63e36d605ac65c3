"""What the controller's process asks of Python and of the operating system before it runs."""

from __future__ import annotations

import gc
import resource

from laminar.errors import UserError

SPARE_FILES = 1024  # open files besides the connections: logs, the terminal, pipes of the workers started here

# Python looks for cycles whenever that many more objects were made than freed; every few times it looks through those that
# have survived as well, and at last through all. The controller holds dozens of objects per trajectory and makes hardly a
# cycle, so going through all frees nothing and stands still for 80 ms and more (docs/controller-speed.md). Young objects
# are still looked through, in portions of a few milliseconds: they are where the cycles of exceptions and tasks are.
YOUNG_OBJECTS = 2_000
YOUNG_COLLECTIONS = 4  # before one of the survivors, too
SURVIVOR_COLLECTIONS = 10_000  # before one of everything: 80 million objects more than were freed


def prepare(workers: int) -> None:
    """Let this process be the controller of so many workers.

    Raises:
        UserError: the machine does not let a process have a connection to each.
    """
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, SURVIVOR_COLLECTIONS)
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

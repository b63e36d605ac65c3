"""Descendants of a process, as /proc shows them: how many, how much memory, and their end."""

from __future__ import annotations

import os

from laminar.environments.sandboxing.kernel import SIGKILL, SIGSTOP

_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """All living descendants of a process, parents before children. Zombies are among them."""
    found: list[int] = []
    to_look_at = [pid]
    while to_look_at:
        for child in _children(to_look_at.pop()):
            found.append(child)
            to_look_at.append(child)
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as listing:
                children += map(int, listing.read().split())
    except OSError:  # it has ended; its children, if any, are the warden's now
        pass
    return children


def private_memory(pid: int) -> int:
    """Bytes of memory that a process has for itself; 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as figures:
            _, resident, shared, *_ = figures.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE


def processes_of_user(user: int) -> int:
    """Threads that a user has at the moment: what RLIMIT_NPROC counts."""
    count = 0
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                if os.stat(f"/proc/{entry}").st_uid == user:
                    count += len(os.listdir(f"/proc/{entry}/task"))
            except OSError:  # it has ended
                continue
    return count


def kill_descendants(pid: int) -> None:
    """Kill all, and those that they start meanwhile. The caller adopts orphans, so none can slip away."""
    while alive := [child for child in descendants(pid) if not _is_zombie(child)]:
        for number in (SIGSTOP, SIGKILL):  # stopped ones start no more while the others are killed
            for child in alive:
                try:
                    os.kill(child, number)
                except ProcessLookupError:
                    continue
        reap_children()
    reap_children()


def reap_children() -> None:
    """Let go of the children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # there are none
        pass


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as line:
            return line.read().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True

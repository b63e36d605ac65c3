"""The process that runs one piece of untrusted code, watches it, ends it, and says how it ended.

  worker --request--> warden --fork--> [entry --fork--> first process --fork-->] the code
                        |  looks at all its descendants every LOOK_S: time, memory, number
  worker <--verdict-----+  once none of them is left

Invariants: when the verdict is sent no descendant is alive and the scratch folder is gone; if the worker ends or shuts
its end of the socket, so does the warden, and with it all of them. The code never runs with less than the limits on a process, the system call filter
and, where the kernel has it, Landlock; namespaces come on top.
"""

from __future__ import annotations

import os
import resource
import select
import time

from laminar.environments.sandboxing import kernel, landlock, namespaces, processes, seccomp
from laminar.environments.sandboxing.request import DOOR, Request, Verdict, read_request

TYPE_CHECKING = False  # `typing` is not imported at all
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

LOOK_S = 0.02
SETUP_FAILED = 125
KILLED = 128 + kernel.SIGKILL
OPEN_FILES = 64
PROCESSES_OF_OURS = 2  # between the warden and the code in namespaces


class SetupFailed(Exception):
    """The code could not be started in this way."""


def main() -> None:
    """Serve one request that comes on standard input, a socket. Later its end says "stop"."""
    kernel.adopt_orphans()
    os.dup2(0, DOOR, inheritable=False)
    request = read_request(DOOR)
    if request is None:
        return  # the worker has gone
    folder = os.path.join(request.folder, f"laminar-sandbox-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    try:
        verdict = serve(request, folder)
    finally:
        processes.kill_descendants(os.getpid())
        remove(folder)
    os.write(DOOR, verdict.pack())


def serve(request: Request, folder: str) -> Verdict:
    """Run it in namespaces, or without if they are not to be had."""
    if request.use_namespaces:
        try:
            pid = start(lambda to_warden, from_warden: _enter(request, folder, to_warden, from_warden))
            return watch(request, pid, "namespaces")
        except SetupFailed:
            processes.kill_descendants(os.getpid())
    isolation = "landlock" if landlock.landlock_version() else "limits"
    try:
        pid = start(lambda to_warden, from_warden: _become_code(request, folder, alone=False))
        return watch(request, pid, isolation)
    except SetupFailed as error:
        return Verdict(ended_by="failed", exit_code=SETUP_FAILED, isolation=isolation, error=str(error))


def start(body: Callable[[int, int], NoReturn]) -> int:
    """Fork a process that ends up as the code, and wait until it is that; `body` gets a pipe to the warden and one from it.

    Raises:
        SetupFailed: on its way there something was refused.
    """
    from_child, to_warden = os.pipe()
    from_warden, to_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(from_child)
        os.close(to_child)
        _guarded(lambda: body(to_warden, from_warden), to_warden)
    os.close(to_warden)
    os.close(from_warden)
    trouble = b""
    while said := os.read(from_child, 4096):  # ends when the code is executed, which closes its end
        if said == namespaces.ASK:
            os.write(to_child, namespaces.map_users(pid))
        else:
            trouble += said
    os.close(from_child)
    os.close(to_child)
    if trouble:
        raise SetupFailed(trouble.decode(errors="replace"))
    return pid


def _guarded(body: Callable[[], NoReturn], to_warden: int) -> NoReturn:
    try:
        kernel.die_with_parent()
        body()
    except BaseException as error:  # whatever it is, a forked process must not go on in its parent's code
        os.write(to_warden, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(SETUP_FAILED)


def _enter(request: Request, folder: str, to_warden: int, from_warden: int) -> NoReturn:
    """New namespaces, their first process, and then the code as a child of that."""
    namespaces.leave_namespaces(to_warden, from_warden)

    def first_process() -> NoReturn:
        namespaces.enter_root(
            folder, readable=request.readable, scratch_bytes=request.scratch_bytes, files=_files(request)
        )
        _fork_and_wait(lambda: _become_code(request, namespaces.SCRATCH, alone=True), to_warden)

    _fork_and_wait(first_process, to_warden)


def _fork_and_wait(body: Callable[[], NoReturn], to_warden: int) -> NoReturn:
    """A child that runs `body`; this process ends as it does."""
    pid = os.fork()
    if pid == 0:
        _guarded(body, to_warden)
    os.close(to_warden)
    os.closerange(0, 3)  # the code's output ends with the code
    while True:
        ended, status = os.wait()
        if ended == pid:
            os._exit(_exit_code(status))


def _become_code(request: Request, folder: str, *, alone: bool) -> NoReturn:
    """Give up everything, and execute the interpreter. `alone`: in namespaces of its own."""
    user = namespaces.INSIDE_USER if alone else namespaces.NOBODY
    privileged = os.geteuid() == 0
    if not alone:
        namespaces.put_files(folder, _files(request), user if privileged else os.geteuid())
    os.chdir(folder)
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.setsid()
    _limit(request, user if privileged else os.geteuid(), alone=alone)
    if privileged:
        unreachable = not alone and not all(
            map(_open_to_all, (request.python, *request.readable, os.path.join(folder, "main.py")))
        )
        kernel.become_user(user, pass_all_files=unreachable and bool(landlock.landlock_version()))
    kernel.die_with_parent()  # a change of user has undone it
    kernel.gain_no_privileges()
    if not alone:
        readable = (*namespaces.SYSTEM_PATHS, *request.readable, *namespaces.DEVICES)
        landlock.confine_files(readable=readable, writable=(folder, "/dev/null"))
    seccomp.filter_system_calls(alone=alone)
    os.execve(request.python, [request.python, "-I", "-u", os.path.join(folder, "main.py")], _environment(folder))


def _open_to_all(path: str) -> bool:
    """Whether any user may enter the folders on the way to a file; not so below /root."""
    path = os.path.realpath(path)
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 1:
            return False
    return True


def _files(request: Request) -> dict[str, bytes]:
    return {"main.py": request.code, "stdin": request.stdin}


def _environment(folder: str) -> dict[str, str]:
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the same code prints the same
        **threads,
    }


def _limit(request: Request, user: int, *, alone: bool) -> None:
    """Limits on this process and its children, each."""
    # In a namespace the kernel counts what this user has there, ours among them where the user is the same; else all.
    same_user = os.geteuid() != 0
    others = PROCESSES_OF_OURS * same_user if alone else processes.processes_of_user(user) - same_user
    for kind, value in (
        (resource.RLIMIT_AS, request.memory_bytes),
        (resource.RLIMIT_CPU, int(request.time_s) + 2),
        (resource.RLIMIT_FSIZE, request.scratch_bytes),
        (resource.RLIMIT_NPROC, request.processes + others),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def watch(request: Request, pid: int, isolation: str) -> Verdict:
    """Wait until process `pid` has ended, or end it for going beyond a limit."""
    ours = PROCESSES_OF_OURS if isolation == "namespaces" else 0
    deadline = time.monotonic() + request.time_s
    process = os.pidfd_open(pid)
    while True:
        readable, _, _ = select.select([process, DOOR], [], [], LOOK_S)
        if process in readable:
            return Verdict(ended_by="exit", exit_code=_exit_code(os.waitpid(pid, 0)[1]), isolation=isolation)
        alive = processes.descendants(os.getpid())
        if DOOR in readable:
            ended_by = "stopped"
        elif time.monotonic() >= deadline:
            ended_by = "time"
        elif len(alive) - ours > request.processes:
            ended_by = "processes"
        elif sum(map(processes.private_memory, alive)) > request.memory_bytes:
            ended_by = "memory"
        else:
            continue
        return Verdict(ended_by=ended_by, exit_code=KILLED, isolation=isolation)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def remove(folder: str) -> None:
    """Delete a folder and all in it, whatever the code has done to its permissions. Nothing else touches it any more."""
    os.chmod(folder, 0o700)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            remove(entry.path)
        else:
            os.unlink(entry.path)
    os.rmdir(folder)

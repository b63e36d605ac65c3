"""The process that holds the user's plain reward functions: `python -m laminar.workers.environment.reward_host FD`.

It loads them once and then forks a process for each call that is to run beside others: a lane. Invariant: it runs none of
the functions itself and has one thread, so a fork is whole; a lane that hangs or dies takes nothing with it.

    worker --config--> host --loaded--> worker              (lines of JSON on FD)
    worker --fork, with one end of a socket--> host --pid--> worker
    worker --kill PID--> host --exit status--> worker
    worker <--calls and outcomes--> lane                     (lines of JSON on that socket)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import socket
import sys
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.data.metadata import decode_metadata
from laminar.errors import UserError
from laminar.rewards.conventions import RewardInput
from laminar.rewards.registry import LoadedPart, load_parts

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MESSAGE_BYTES = 64  # of an order after the first


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def main(fd: int, parent: int) -> None:
    """Load the parts, say which of them are for the worker's own loop, then fork and kill as told."""
    die_with(parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    control = socket.socket(fileno=fd)
    with control.makefile("rb") as lines:
        config = ExperimentConfig.model_validate_json(json.loads(lines.readline()))
    try:
        parts = load_parts(config)
    except UserError as error:
        send(control, {"user_error": str(error)})
        return
    send(control, {"in_loop": [place for place, part in parts.items() if part.in_loop]})
    while True:
        order, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
        if not order:
            return  # the worker has gone
        name, _, pid = order.decode().partition(" ")
        send(control, fork_lane(control, fds[0], parts) if name == "fork" else end_lane(int(pid)))


def fork_lane(control: socket.socket, fd: int, parts: dict[int, LoadedPart]) -> int:
    """Process id of a new lane that serves calls on `fd`."""
    host = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with(host)
            os.setpgid(0, 0)
            control.close()
            serve(socket.socket(fileno=fd), parts)
            status = 0
        finally:
            os._exit(status)
    os.close(fd)
    with contextlib.suppress(OSError):  # it was faster, or has ended already
        os.setpgid(pid, pid)
    return pid


def end_lane(pid: int) -> int:
    """Exit status of a lane, after killing it and what it has started: that of the lane's own end if it had ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve(connection: socket.socket, parts: dict[int, LoadedPart]) -> None:
    """Score until the worker closes the connection."""
    with connection.makefile("rb") as calls:
        for line in calls:
            call = json.loads(line)
            request = RewardInput(**call["request"] | {"metadata": decode_metadata(call["request"]["metadata"])})
            outcome = parts[call["place"]].reward.score_now(request)
            send(connection, {"reward": None if math.isnan(outcome.reward) else outcome.reward, "error": outcome.error})


def send(connection: socket.socket, value: Any) -> None:
    """A line of JSON."""
    connection.sendall(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

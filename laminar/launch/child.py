"""`python -m laminar.launch.child PARENT_PID COMMAND ...`: become COMMAND, which dies when the parent does.

The kernel sends SIGTERM to the command when its parent ends, however that happens (SIGKILL included). torchrun and
mpirun then end what they have started; a worker also watches the controller's process itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the death signal and exec; exits with 127 if the command cannot be run."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        raise SystemExit(143)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127) from error


if __name__ == "__main__":
    main()

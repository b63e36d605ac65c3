"""`python -m laminar.launch.child PARENT_PID SIGNAL COMMAND ...`: become COMMAND, which dies when the parent does.

The kernel sends the signal to the command when its parent ends, however that happens (SIGKILL included). torchrun and
mpirun then end what they have started; a worker also watches the parent's process itself.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the death signal and exec; exits with 127 if the command cannot be run."""
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        raise SystemExit(128 + number)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127) from error


if __name__ == "__main__":
    main()

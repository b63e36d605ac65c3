"""How a worker finds its controller: one small file in the run directory, readable by its owner only.

It holds the address, the keys that authenticate both sides (CURVE), and which process the controller is, so that a
worker on the same machine can end the moment that process does.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

from laminar.errors import UserError

CONNECTION_FILE = "connection.json"
# Environment of the processes that `laminar train` starts.
LOG_DIR_VARIABLE = "LAMINAR_LOG_DIR"  # a worker writes its output to a file of its own there
RUN_ID_VARIABLE = "LAMINAR_RUN_ID"  # marks every process of a run, children of children included


@dataclass(kw_only=True, slots=True, frozen=True)
class CurveKeys:
    """One CURVE key pair (Z85)."""

    public: str
    secret: str

    @classmethod
    def create(cls) -> CurveKeys:
        """A new random pair."""
        public, secret = zmq.curve_keypair()
        return cls(public=public.decode(), secret=secret.decode())


@dataclass(kw_only=True, slots=True, frozen=True)
class Connection:
    """Contents of the connection file."""

    address: str  # tcp://host:port
    run_id: str
    controller_public_key: str  # Z85, as ZeroMQ's CURVE takes it
    worker_public_key: str
    worker_secret_key: str
    controller_pid: int
    controller_started: int  # start time of that process in clock ticks since boot: a pid may be reused
    boot_id: str  # of the controller's machine
    # The process that starts workers on that machine, and outlives the controller; 0: none.
    launcher_pid: int = 0
    launcher_started: int = 0

    @classmethod
    def to_this_process(
        cls, address: str, run_id: str, *, controller: CurveKeys, worker: CurveKeys, launcher_pid: int = 0
    ) -> Connection:
        """What to publish when this process is the controller."""
        return cls(
            address=address,
            run_id=run_id,
            controller_public_key=controller.public,
            worker_public_key=worker.public,
            worker_secret_key=worker.secret,
            controller_pid=os.getpid(),
            controller_started=process_started(os.getpid()) or 0,
            boot_id=boot_id(),
            launcher_pid=launcher_pid,
            launcher_started=process_started(launcher_pid) or 0 if launcher_pid else 0,
        )

    def write(self, run_dir: Path) -> Path:
        """Write the file with mode 0600; it appears at once and complete."""
        path = run_dir / CONNECTION_FILE
        temporary = run_dir / f".{CONNECTION_FILE}.{os.getpid()}"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
        temporary.rename(path)
        return path

    @classmethod
    def read(cls, path: Path) -> Connection:
        """Read the file.

        Raises:
            UserError: it is missing or is not a connection file.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise UserError(
                f"{path}: no such file. Start the controller first (`laminar train`): it publishes its address there"
            ) from error
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: not a connection file of this version ({error})") from error


def boot_id() -> str:
    """Identity of this machine's current boot; falls back to the host name where /proc lacks it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def process_started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name (field 2) is in parentheses and may hold spaces; the start time is field 22.
    return int(stat.rpartition(")")[2].split()[19])

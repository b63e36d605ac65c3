"""Hosts on one machine: network namespaces with their own address, name and /dev/shm, joined by a switch.

    with NetworkHosts(4, rate_mbit=1000) as hosts:
        hosts[2].run(["hostname"])
        hosts[2].set_link(up=False)

Every host is a process (`cat`) in namespaces of its own, whose standard input this process holds; the switch is one more, with
a bridge inside. This process stays where it is and is reached at `hosts.address`.

Invariant: nothing is left. Leaving the block kills all that runs on the hosts; if this process is killed instead, the
hosts' own processes read the end of their input and end, and the kernel removes namespaces and links with the last process
that lives there.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_LIMIT_S = 10.0
COMMAND_LIMIT_S = 30.0
END_LIMIT_S = 10.0
BURST_S = 0.004  # of traffic that a rate limit lets pass at once
SMALLEST_BURST_BYTES = 1 << 17  # two of the largest packets
QUEUE_MS = 50  # longest wait in the queue of a rate limit
MAX_HOSTS = 64
TRIAL_LIMIT_S = 10.0

_NAMESPACES = ("--net", "--uts", "--mount")
_TRIAL = (
    "ip link add trial0 type veth peer name trial1 && ip link add trial2 type bridge && tc qdisc add dev trial0 root "
)


def available() -> str:
    """Empty if this machine lets us make hosts, else why not, in one line."""
    return _try(f"{_TRIAL} tbf rate 1gbit burst 1mb latency 50ms && mount -t tmpfs tmpfs /dev/shm")


def delay_available() -> str:
    """Empty if links can be given a delay too, else why not, in one line."""
    return available() or _try(f"{_TRIAL} netem delay 1ms")


def _try(script: str) -> str:
    """Run a script in namespaces that vanish with it; its complaint."""
    try:
        result = subprocess.run(
            ["unshare", *_NAMESPACES, "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=TRIAL_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces: {error}"
    return f"network namespaces: {' '.join(result.stderr.split())}" if result.returncode else ""


class Namespaces:
    """A process in its own network, UTS and mount namespaces, and what runs there."""

    def __init__(self, name: str, names_file: Path) -> None:
        """Start it; `names_file` becomes its /etc/hosts."""
        self.name = name
        self._started: list[subprocess.Popen[Any]] = []
        script = (
            f"hostname {name} && mount -t tmpfs tmpfs /dev/shm && mount --bind {shlex.quote(str(names_file))} /etc/hosts"
            " && ip link set lo up && echo ready && exec cat"
        )
        self._anchor = subprocess.Popen(
            ["unshare", *_NAMESPACES, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._anchor.stdout is not None and self._anchor.stderr is not None
        ready, _, _ = select.select([self._anchor.stdout], [], [], START_LIMIT_S)
        if not ready or self._anchor.stdout.readline() != b"ready\n":
            self._anchor.kill()
            said = self._anchor.communicate()[1].decode().strip()
            raise RuntimeError(f"{name} did not start within {START_LIMIT_S:g} s: {said}")
        self._network = os.stat(f"/proc/{self.pid}/ns/net").st_ino

    @property
    def pid(self) -> int:
        """The process that keeps the namespaces."""
        return self._anchor.pid

    @property
    def shared_memory(self) -> Path:
        """Its /dev/shm, seen from here."""
        return Path(f"/proc/{self.pid}/root/dev/shm")

    def command(self, argv: Sequence[object]) -> list[str]:
        """The command line that runs `argv` here, in this process's working directory."""
        enter = ["nsenter", "--target", str(self.pid), *_NAMESPACES, "env", f"--chdir={os.getcwd()}"]
        return [*enter, *(str(part) for part in argv)]

    def run(self, argv: Sequence[object], limit_s: float = COMMAND_LIMIT_S) -> str:
        """Run a command here and return what it printed.

        Raises:
            RuntimeError: it failed; with what it said.
            subprocess.TimeoutExpired: it took longer than `limit_s`.
        """
        return _run(self.command(argv), limit_s)

    def start(self, argv: Sequence[object], **options: Any) -> subprocess.Popen[Any]:
        """Start a command here, as a session of its own; `options` as of `subprocess.Popen`."""
        process = subprocess.Popen(self.command(argv), start_new_session=True, **options)
        self._started.append(process)
        return process

    def processes(self) -> list[int]:
        """All that live in these namespaces, however they came there."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is a zombie
                if entry.name.isdecimal() and os.stat(entry / "ns/net").st_ino == self._network:
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Kill all that runs here, which ends the namespaces. Raises TimeoutError if something does not end."""
        deadline = time.monotonic() + END_LIMIT_S
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in (*self._started, self._anchor):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        for stream in (self._anchor.stdin, self._anchor.stdout, self._anchor.stderr):
            if stream is not None:
                stream.close()
        if pids:
            raise TimeoutError(f"processes {pids} of {self.name} have not ended within {END_LIMIT_S:g} s")


class NetworkHost(Namespaces):
    """One host: `eth0`, with an address, on a port of the switch."""

    def __init__(self, name: str, address: str, port: str, switch: Namespaces, names_file: Path) -> None:
        super().__init__(name, names_file)
        self.address = address
        self._port = port
        self._switch = switch

    def plug_in(self) -> None:
        """Connect it to the switch."""
        port, address, switch = self._port, self.address, self._switch
        _run(["ip", "link", "add", port, "netns", str(switch.pid), *_VETH, "eth0", "netns", str(self.pid)])
        switch.run(["ip", "link", "set", port, "master", "bridge", "up"])
        self.run(["ip", "address", "add", f"{address}/24", "dev", "eth0"])
        self.run(["ip", "link", "set", "eth0", "up"])

    def set_link(self, *, up: bool) -> None:
        """Plug the host's cable in, or pull it."""
        self._switch.run(["ip", "link", "set", self._port, "up" if up else "down"])

    def limit(self, rate_mbit: float, delay_ms: float = 0.0) -> None:
        """Rate in Mbit/s (10^6) in each direction, and delay in ms of what leaves the host; in place of what held before.

        Raises:
            RuntimeError: the kernel has no netem, which delays.
        """
        burst = max(SMALLEST_BURST_BYTES, int(rate_mbit * 1e6 / 8 * BURST_S))
        rate = ["tbf", "rate", f"{int(rate_mbit * 1e3)}kbit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"]
        for side, device in ((self._switch, self._port), (self, "eth0")):
            side.run(["tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", *rate])
        if delay_ms:
            delay = ["netem", "delay", f"{delay_ms:g}ms", "limit", "100000"]
            self.run(["tc", "qdisc", "replace", "dev", "eth0", "parent", "1:1", "handle", "10:", *delay])


class NetworkHosts:
    """Hosts "host-0", "host-1", ... and the switch between them."""

    def __init__(self, count: int, *, rate_mbit: float | None = None, delay_ms: float = 0.0) -> None:
        """Args: see `NetworkHost.limit`; without a rate the links are as fast as the machine.

        Raises:
            ValueError: more than MAX_HOSTS hosts, or a delay without a rate.
        """
        if not 1 <= count <= MAX_HOSTS or (delay_ms and rate_mbit is None):
            raise ValueError(f"{count} hosts (1 to {MAX_HOSTS}), {rate_mbit} Mbit/s, {delay_ms} ms")
        self._count = count
        self._rate_mbit = rate_mbit
        self._delay_ms = delay_ms
        self._uplink = f"laminar-{uuid.uuid4().hex[:6]}"  # our own end of a link to the switch; at most 15 characters
        self._hosts: list[NetworkHost] = []
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._ends:
            self._folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory()))
            prefix = _free_prefix()
            self.address = f"{prefix}.1"  # where the hosts reach this process
            names = {f"host-{index}": f"{prefix}.{10 + index}" for index in range(self._count)}
            names_file = self._folder / "hosts"
            lines = [f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()]
            names_file.write_text("".join(lines), encoding="ascii")
            self._make_switch(names_file)
            for index, (name, address) in enumerate(names.items()):
                host = NetworkHost(name, address, f"port-{index}", self._switch, names_file)
                self._ends.callback(host.close)
                host.plug_in()
                self._hosts.append(host)
                if self._rate_mbit is not None:
                    host.limit(self._rate_mbit, self._delay_ms)
            self._ends = self._ends.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()

    def __getitem__(self, index: int) -> NetworkHost:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[NetworkHost]:
        return iter(self._hosts)

    def ssh_agent(self) -> Path:
        """A program that mpirun takes for ssh (`--prtemca plm_ssh_agent`): [options] HOST COMMAND..., run on that host."""
        path = self._folder / "ssh-agent"
        cases = "".join(f"{host.name}) pid={host.pid} ;;\n" for host in self._hosts)
        path.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
            f'case "$host" in\n{cases}*) echo "no host $host" >&2; exit 255 ;;\nesac\n'
            f'exec nsenter --target "$pid" {" ".join(_NAMESPACES)} sh -c "$*"\n',
            encoding="ascii",
        )
        path.chmod(0o700)
        return path

    def _make_switch(self, names_file: Path) -> None:
        self._switch = Namespaces("switch", names_file)
        self._ends.callback(self._switch.close)
        self._switch.run(["ip", "link", "add", "bridge", "type", "bridge"])
        self._switch.run(["ip", "link", "set", "bridge", "up"])
        _run(["ip", "link", "add", self._uplink, *_VETH, "uplink", "netns", str(self._switch.pid)])
        self._ends.callback(_run, ["ip", "link", "delete", self._uplink])
        self._switch.run(["ip", "link", "set", "uplink", "master", "bridge", "up"])
        _run(["ip", "address", "add", f"{self.address}/24", "dev", self._uplink])
        _run(["ip", "link", "set", self._uplink, "up"])


_VETH = ("type", "veth", "peer", "name")


def _run(argv: list[str], limit_s: float = COMMAND_LIMIT_S) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False)
    if result.returncode:
        said = (result.stderr or result.stdout).strip()
        raise RuntimeError(f"{shlex.join(argv)} ended with {result.returncode}: {said}")
    return result.stdout


def _free_prefix() -> str:
    """Three bytes of an address range that no interface here has, out of 198.18.0.0/15, reserved for benchmarks (RFC 2544)."""
    taken = _run(["ip", "-oneline", "-4", "address"])
    for offset in range(256):
        prefix = f"198.18.{(os.getpid() + offset) % 256}"
        if f" {prefix}." not in taken:
            return prefix
    raise RuntimeError("all of 198.18.0.0/16 is taken")

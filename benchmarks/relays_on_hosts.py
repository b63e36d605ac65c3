"""Relays on hosts of their own (network_hosts.py), joined by links of a limited rate; and the paper's formula against them.

    python benchmarks/relays_on_hosts.py [--lengths 2 3 4 6 8] [--mib 64] [--rate-mbit 400] [--chunk-mib 1] [--mpi] [--json]

The formula (paper, appendix D; SPEC.md 4): p relays, the master relay included, have m bytes in k chunks after
T = (p - 2 + k) (alpha + beta m / k), with alpha the latency of a hop (the least that a relay measured) and 1 / beta its
bandwidth (as measured on the shortest chain). Times are from the controller's first order to the last relay's answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import zmq
from network_hosts import NetworkHost, NetworkHosts, available
from relay_tier import RelayTier
from rich.console import Console
from rich.table import Table

from laminar.controller.relay import store_name
from laminar.protocol.connection import CONNECTION_FILE, Connection
from laminar.protocol.messages import CarryProgress
from laminar.weights.checksum import checksum
from laminar.weights.store import WeightStore

MIB = 1 << 20
LAUNCH = Path(__file__).parents[1] / "scripts" / "launch"
PROGRESS_LIMIT_S = 60.0


class RelayTierOnHosts(RelayTier):
    """Relay i lives on host i, the publisher on host 0, the controller here; started by `scripts/launch/relays.sh`."""

    def __init__(self, hosts: NetworkHosts, relays: int, nbytes: int, *, mpi: bool = False, **options: object) -> None:
        """On the first `relays` of the hosts: in one mpirun world (`mpi`) or each by its own command, with TCP alone."""
        super().__init__(relays, nbytes, **options)
        self._hosts = hosts
        self._mpi = mpi

    async def received(self, name: str, chunks: int) -> None:
        """Wait until a relay says that it has so many chunks of the version under way. Raises TimeoutError."""
        reached = asyncio.Event()

        def look(worker: Any, message: CarryProgress) -> None:
            self.manager._on_progress(worker, message)
            if worker.name == name and message.policy_version == self.version and message.received >= chunks:
                reached.set()

        self.registry.handle(CarryProgress, look)
        try:
            async with asyncio.timeout(PROGRESS_LIMIT_S):
                await reached.wait()
        finally:
            self.registry.handle(CarryProgress, self.manager._on_progress)

    def checksum(self, rank: int, version: int) -> int:
        """Of what a relay's store holds as this version."""
        store = WeightStore(self._run_id, store_name(rank), self._hosts[rank].shared_memory)
        with store.open(version) as reader:
            return checksum(reader.buffer)

    def logs(self) -> str:
        """Everything that the processes have said."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._run_dir.rglob("*.log")))

    def _start_publisher(self) -> None:
        self._listen_to_hosts()
        program = Path(__file__).with_name("publisher.py")
        self._start_on(self._hosts[0], [sys.executable, program, "--connect", self._run_dir])

    def _listen_to_hosts(self) -> None:
        """Have the controller reached at the hosts' network too, before anything is started that reads where."""
        router = self._channel._socket.socket
        router.bind(f"tcp://{self._hosts.address}:*")
        address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        replace(Connection.read(self._run_dir / CONNECTION_FILE), address=address).write(self._run_dir)

    def _start_world(self) -> None:
        count = self.config.relay.count
        if not self._mpi:
            for rank in range(count):
                self._start_alone(rank)
            return
        hostfile = self._run_dir / "hosts.txt"
        hostfile.write_text("".join(f"{self._hosts[rank].name}\n" for rank in range(count)), encoding="ascii")
        options = f"MPI_OPTIONS=--prtemca plm_ssh_agent {self._hosts.ssh_agent()}"
        self._start_on(self._hosts[0], [*_RELAYS, self._run_dir, count, hostfile], options)

    async def _restart(self, name: str, reason: str) -> None:
        self._start_alone(int(name.removeprefix("relay-")))

    def _start_alone(self, rank: int) -> None:
        self._start_on(self._hosts[rank], [*_RELAYS, self._run_dir, "--index", rank])

    def _start_on(self, host: NetworkHost, argv: Sequence[object], *variables: str) -> None:
        self._start(host.command(["env", f"LAMINAR_PYTHON={sys.executable}", *variables, *argv]))


_RELAYS = ["bash", LAUNCH / "relays.sh"]


def formula(relays: int, nbytes: int, chunks: int, latency_s: float, bytes_per_s: float) -> float:
    """Seconds for a chain (paper, appendix D)."""
    return (relays - 2 + chunks) * (latency_s + nbytes / bytes_per_s / chunks)


async def measure_length(
    hosts: NetworkHosts, length: int, mib: int, chunk_mib: float, repeats: int, *, mpi: bool = False
) -> dict[str, float]:
    """Seconds of a broadcast, and what the last relay measured of its hop: medians, and the least of what noise only adds to.

    Raises:
        RuntimeError: a relay did not get a version.
    """
    async with RelayTierOnHosts(
        hosts, length, mib * MIB, mpi=mpi, encoding="full", chunk_mib=chunk_mib, keep_versions=1
    ) as tier:
        hops = []
        for _ in range(repeats + 1):  # the first makes connections and memory
            await tier.publish()
            over = await tier.broadcast_over(tier.version)
            hop = tier.manager.relays[length - 1].last
            if over.error or hop is None:
                raise RuntimeError(f"{length} relays, version {tier.version}: {over.error}")
            hops.append(hop)
        seconds = [event.seconds for event in tier.broadcasts[1:]]
        return {
            "length": length,
            "seconds": median(seconds),
            "fastest_s": min(seconds),
            "chunks": hops[0].chunks,
            "latency_s": min(hop.latency_s for hop in hops),
            "bytes_per_s": median(hop.bytes_per_s for hop in hops[1:]),
        }


def with_formula(figures: list[dict[str, float]], mib: int) -> dict[str, Any]:
    """The figures, each with the formula's prediction from the least latency and the shortest chain's bandwidth."""
    first = figures[0]
    latency_s = min(entry["latency_s"] for entry in figures)
    for entry in figures:
        entry["formula_s"] = formula(
            int(entry["length"]), mib * MIB, int(entry["chunks"]), latency_s, first["bytes_per_s"]
        )
        entry["over_formula"] = entry["seconds"] / entry["formula_s"]
        entry["over_shortest"] = entry["seconds"] / first["seconds"]
    return {"mib": mib, "latency_s": latency_s, "bytes_per_s": first["bytes_per_s"], "lengths": figures}


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table(
        title=f"{figures['mib']} MiB in {figures['lengths'][0]['chunks']} chunks; a hop, as the relays measured it: "
        f"{figures['bytes_per_s'] * 8 / 1e6:.0f} Mbit/s, {figures['latency_s'] * 1e3:.2f} ms"
    )
    for column in ("relays", "seconds", "formula", "over formula", "over shortest"):
        table.add_column(column, justify="right")
    for entry in figures["lengths"]:
        table.add_row(
            str(entry["length"]),
            f"{entry['seconds']:.3f}",
            f"{entry['formula_s']:.3f}",
            f"{entry['over_formula']:.2f}",
            f"{entry['over_shortest']:.2f}",
        )
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 3, 4, 6, 8], help="relays, the master included")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rate-mbit", type=float, default=400.0, help="of every host's link, in 10^6 bit/s")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of what leaves a host; takes the kernel's netem")
    parser.add_argument("--chunk-mib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mpi", action="store_true", help="one mpirun world instead of TCP hops")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    if reason := available():
        parser.exit(2, f"{reason}; expected root and the tools ip, tc, unshare, nsenter (apt-get install iproute2)\n")
    lengths = sorted(options.lengths)
    with NetworkHosts(lengths[-1], rate_mbit=options.rate_mbit, delay_ms=options.delay_ms) as hosts:
        measured = [
            asyncio.run(measure_length(hosts, length, options.mib, options.chunk_mib, options.repeats, mpi=options.mpi))
            for length in lengths
        ]
    figures = {"rate_mbit": options.rate_mbit, "mpi": options.mpi, **with_formula(measured, options.mib)}
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)


if __name__ == "__main__":
    main()

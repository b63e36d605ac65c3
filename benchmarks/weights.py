"""How fast weights move on this machine, always over a plain memory copy of the same bytes made in the same run.

    python benchmarks/weights.py [--mib 256] [--repeats 5] [--lengths 2 4 8] [--versus] [--pull] [--kills 40] [--json]

- publish: layout, copy and commit of a state dict into the trainer's weight store, for which training stands still.
  "prepared" is what a run does (the store has memory ready); "fresh" is a store that has none, so that the kernel zeroes
  every page during the copy.
- chain: one broadcast down a chain of relays, from the order to the moment when the last relay holds the checked version.
  Aggregate: bytes received by all relays together per second. Everything is as in a run, the controller's part included.
- healing: relays killed, see healing.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from healing import measure_healing
from healing import show as show_healing
from relay_tier import RelayTier
from reshard import make_model, measure_pull
from rich.console import Console
from rich.table import Table
from weights_peers import PEERS, absent, measure_peer

from laminar.weights import run_memory
from laminar.weights.store import WeightStore

MIB = 1 << 20
SETTLE_S, IDLE_S = 3.0, 5.0
HEALING_MIB = (
    512  # at most: its seconds are those until all survivors hold everything, the rest of the transfer included
)


def seconds(action: Callable[[], object]) -> float:
    """Duration of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure_publish(run_id: str, mib: int, repeats: int) -> dict[str, float]:
    """Medians in seconds; every round makes each measurement once, so that noise hits all of them alike."""
    import torch

    from laminar.weights.tensors import layout_of, write_tensors

    torch.set_num_threads(1)
    rows = mib * MIB // (4 * 1024 * 8)
    state_dict = {f"layers.{index}.weight": torch.randn(rows, 1024) for index in range(8)}
    source = np.ones(mib * MIB, np.uint8)
    target = np.ones(mib * MIB, np.uint8)
    store = WeightStore(run_id, "publish")
    version = 0

    def publish() -> None:
        nonlocal version
        version += 1
        with store.begin(version, layout_of(state_dict)) as writer:
            write_tensors(writer, state_dict.items())
            writer.commit()

    times: dict[str, list[float]] = {"copy": [], "copy_into_fresh_memory": [], "publish": [], "publish_fresh": []}
    for _ in range(repeats):
        times["copy"].append(seconds(lambda: np.copyto(target, source)))
        times["copy_into_fresh_memory"].append(seconds(lambda: source.copy()))
        times["publish_fresh"].append(seconds(publish))
        store.retain(1)
        if not store.prepare(layout_of(state_dict)):
            raise SystemExit(f"not enough shared memory for two versions of {mib} MiB")
        times["publish"].append(seconds(publish))
        store.retain(1)
    store.remove()
    return {name: median(values) for name, values in times.items()}


async def measure_chain(length: int, mib: int, repeats: int) -> dict[str, float]:
    """Medians in seconds for a tier of `length` relays under mpirun, with all that the controller does for a broadcast."""
    source, target = np.ones(mib * MIB, np.uint8), np.ones(mib * MIB, np.uint8)
    times: dict[str, list[float]] = {"copy": [], "chain": []}
    # All bytes travel: this is about the transport.
    async with RelayTier(length, mib * MIB, encoding="full", keep_versions=1, chunk_mib=4.0) as tier:
        for _ in range(repeats + 1):  # the first makes connections and has no memory prepared
            await tier.publish()
            times["chain"].append((await tier.broadcast_over(tier.version)).seconds)
            await tier.memory_ready()
            times["copy"].append(seconds(lambda: np.copyto(target, source)))
        sums = {tier.checksum(rank, tier.version) for rank in range(length)}
        latency_s = median(relay.last.latency_s for relay in tier.manager.relays.values() if relay.last is not None)
    if len(sums) > 1:
        raise SystemExit(f"the relays of a chain of {length} hold different bytes")
    first = {"chain_first": times["chain"][0], "latency_s": latency_s}
    return {name: median(values[1:]) for name, values in times.items()} | first


async def measure_wire(mib: int) -> dict[str, float]:
    """Bytes of a version over those that travel as deltas (made-up weights, 1 % changed), and what an idle relay takes."""
    async with RelayTier(2, mib * MIB, encoding="delta", keep_versions=2) as tier:
        for _ in range(3):
            await tier.publish()
            await tier.broadcast_over(tier.version)
        await asyncio.sleep(SETTLE_S)  # memory for the next version is prepared
        pids = [worker.pid for worker in tier.registry.workers.values() if worker.kind == "relay"]
        before, began = sum(map(cpu_seconds, pids)), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        idle = (sum(map(cpu_seconds, pids)) - before) / (time.perf_counter() - began) / len(pids)
        last = tier.broadcasts[-1]
        return {
            "delta_ratio": last.nbytes / last.received_bytes,
            "idle_cpu_fraction": idle,
            "idle_private_mib": max(map(private_bytes, pids)) / MIB,
        }


def measure_pulls() -> dict[str, float]:
    """By engine: seconds of loading a version over those of a memory copy of its bytes."""
    run_id = f"benchmark-pull-{os.getpid()}"
    run_memory.claim(run_id)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder), 1024, 4)
            return {name: measure_pull(name, model, run_id)["pull_over_copy"] for name in ("torch", "vllm")}
    finally:
        run_memory.remove(run_id)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def private_bytes(pid: int) -> int:
    """Resident memory of a process beyond what it shares, the store among it."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure_versus(lengths: list[int], mib: int, repeats: int, chains: dict[int, dict[str, float]]) -> dict[str, Any]:
    """For each other way, by length: its time over that of the relays' chain."""
    versus: dict[str, Any] = {}
    for name in PEERS:
        if reason := absent(name):
            versus[name] = reason
            continue
        times = measure_peer(name, lengths, mib, repeats)
        versus[name] = {str(length): times[length] / chains[length]["chain"] for length in lengths}
    return versus


def project(latency_s: float, delta_ratio: float) -> dict[str, float]:
    """72B in bfloat16 to 127 relays by the paper's formula, seconds; the paper says under 1.6 s."""
    nbytes, relays, bytes_per_s = 72.7e9 * 2, 128, 2 * 400e9 / 8  # two NICs of 400 Gbit/s on each host

    def seconds_for(m: float) -> float:
        return (math.sqrt(m / bytes_per_s) + math.sqrt(latency_s * (relays - 2))) ** 2

    return {"latency_s": latency_s, "full_s": seconds_for(nbytes), "delta_s": seconds_for(nbytes / delta_ratio)}


def report(
    options: argparse.Namespace, publish: dict[str, float], chains: dict[int, dict[str, float]]
) -> dict[str, Any]:
    """The figures as they are printed by `--json`."""
    gib = options.mib / 1024
    return {
        "mib": options.mib,
        "repeats": options.repeats,
        "copy_gib_s": gib / publish["copy"],
        "copy_into_fresh_memory_gib_s": gib / publish["copy_into_fresh_memory"],
        "publish_gib_s": gib / publish["publish"],
        "publish_stall_over_copy": publish["publish"] / publish["copy"],
        "publish_fresh_stall_over_copy": publish["publish_fresh"] / publish["copy"],
        "chain": {
            str(length): {
                "copy_gib_s": gib / times["copy"],
                "gib_s": gib / times["chain"],
                "first_gib_s": gib / times["chain_first"],
                "aggregate_over_copy": (length - 1) * times["copy"] / times["chain"],
                "latency_s": times["latency_s"],
            }
            for length, times in chains.items()
        },
    }


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table(title=f"weights of {figures['mib']} MiB, medians of {figures['repeats']}")
    for column in ("what", "GiB/s", "against a memory copy"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row("memory copy", f"{figures['copy_gib_s']:.1f}", "1.00 x its time")
    fresh = figures["copy_into_fresh_memory_gib_s"]
    table.add_row("memory copy into fresh memory", f"{fresh:.1f}", f"{figures['copy_gib_s'] / fresh:.2f} x its time")
    table.add_row("publish", f"{figures['publish_gib_s']:.1f}", f"{figures['publish_stall_over_copy']:.2f} x its time")
    stall = figures["publish_fresh_stall_over_copy"]
    table.add_row("publish, no memory prepared", f"{figures['copy_gib_s'] / stall:.1f}", f"{stall:.2f} x its time")
    for length, chain in figures["chain"].items():
        table.add_row(
            f"chain of {length} relays", f"{chain['gib_s']:.1f}", f"{chain['aggregate_over_copy']:.2f} of its bytes/s"
        )
    for name, ratios in figures.get("versus", {}).items():
        for length, ratio in ratios.items() if isinstance(ratios, dict) else ():
            table.add_row(f"{name}, {length} processes", "", f"{ratio:.2f} x the chain's time")
    for name, pull in figures.get("pull_over_copy", {}).items():
        table.add_row(f"pull into {name}", "", f"{pull:.2f} x its time")
    Console().print(table)
    for name in ("delta_ratio", "idle_cpu_fraction", "idle_private_mib", "projection_72b_to_127"):
        Console().print(name, figures[name])
    if "healing" in figures:
        show_healing(figures["healing"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2], help="chain lengths, master relay included")
    parser.add_argument(
        "--kills", type=int, default=0, help="relays to kill for the healing figures; each takes seconds"
    )
    parser.add_argument("--versus", action="store_true", help="the same job by gloo, ZeroMQ, Redis and files")
    parser.add_argument("--pull", action="store_true", help="loading a version into both engines")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # its warnings are no part of the JSON
    run_id = f"benchmark-{os.getpid()}"
    run_memory.claim(run_id)
    try:
        publish = measure_publish(run_id, options.mib, options.repeats)
    finally:
        run_memory.remove(run_id)
    chains = {length: asyncio.run(measure_chain(length, options.mib, options.repeats)) for length in options.lengths}
    figures = report(options, publish, chains) | asyncio.run(measure_wire(options.mib))
    figures["projection_72b_to_127"] = project(
        max(times["latency_s"] for times in chains.values()), figures["delta_ratio"]
    )
    if options.kills:  # before the other ways, whose files fill the page cache and are still on their way to the disk
        figures["healing"] = asyncio.run(measure_healing(options.kills, relays=4, mib=min(options.mib, HEALING_MIB)))
    if options.versus:
        figures["versus"] = measure_versus(options.lengths, options.mib, options.repeats, chains)
    if options.pull:
        figures["pull_over_copy"] = measure_pulls()
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)


if __name__ == "__main__":
    main()

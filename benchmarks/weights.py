"""How fast weights move on this machine, always over a plain memory copy of the same bytes made in the same run.

    python benchmarks/weights.py [--mib 256] [--repeats 5] [--lengths 2 4 8] [--kills 40] [--json]

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
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from healing import measure_healing
from healing import show as show_healing
from relay_tier import RelayTier
from rich.console import Console
from rich.table import Table

from laminar.weights import run_memory
from laminar.weights.store import WeightStore

MIB = 1 << 20


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
            times["copy"].append(seconds(lambda: np.copyto(target, source)))
        sums = {tier.checksum(rank, tier.version) for rank in range(length)}
    if len(sums) > 1:
        raise SystemExit(f"the relays of a chain of {length} hold different bytes")
    return {name: median(values[1:]) for name, values in times.items()} | {"chain_first": times["chain"][0]}


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
    Console().print(table)
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
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    run_id = f"benchmark-{os.getpid()}"
    run_memory.claim(run_id)
    try:
        publish = measure_publish(run_id, options.mib, options.repeats)
    finally:
        run_memory.remove(run_id)
    chains = {length: asyncio.run(measure_chain(length, options.mib, options.repeats)) for length in options.lengths}
    figures = report(options, publish, chains)
    if options.kills:
        figures["healing"] = asyncio.run(measure_healing(options.kills, relays=4, mib=options.mib))
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)


if __name__ == "__main__":
    main()

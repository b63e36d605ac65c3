"""Kills of relays: how long until the weights flow again.

    python benchmarks/healing.py [--kills 40] [--relays 4] [--mib 256] [--json]

Every round publishes a version, kills one relay with SIGKILL (master, the one after it, the middle, the tail, in turn; in
every other round while the transfer is under way, at a random moment, else when all is quiet) and waits until every survivor
holds the version, bit-exact. The time from the kill to then is more than the time until the weights flow again. Killed when
all is quiet, a relay is counted until the controller has noticed. The relay is brought back before the next round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import time
from statistics import median
from typing import Any

from relay_tier import RelayTier
from rich.console import Console
from rich.table import Table

MIB = 1 << 20


async def measure_healing(kills: int, relays: int, mib: int, seed: int = 0) -> dict[str, Any]:
    """Seconds per kill, and how many transfers were completed by all survivors."""
    chance = random.Random(seed)
    places = {"master": 0, "second": 1, "middle": relays // 2, "tail": relays - 1}
    rounds: list[dict[str, Any]] = []
    # All bytes travel, so that there is time to be killed in.
    async with RelayTier(relays, mib * MIB, encoding="full", keep_versions=2) as tier:
        for _ in range(
            3
        ):  # the first makes connections and has no memory prepared: a moment in it is after the end of others
            await tier.publish()
            await tier.broadcast_over(tier.version)
            await tier.memory_ready()
        usual = min(event.seconds for event in tier.broadcasts)
        for number in range(kills):
            place = list(places)[number % len(places)]
            during = (number // len(places)) % 2 == 0
            rounds.append(await _round(tier, f"relay-{places[place]}", chance.random() * usual if during else None))
            rounds[-1] |= {"place": place, "during_transfer": during}
    return _figures(rounds, relays, mib)


async def _round(tier: RelayTier, victim: str, moment: float | None) -> dict[str, Any]:
    survivors = {relay.name for relay in tier.manager.present()} - {victim}
    await tier.publish()
    if moment is None:
        await tier.broadcast_over(tier.version)
    else:
        await asyncio.sleep(moment)
    under_way = not any(event.policy_version == tier.version for event in tier.broadcasts)
    pid = tier.registry.workers[victim].pid

    def noticed() -> bool:
        worker = tier.registry.workers.get(victim)
        return worker is None or worker.pid != pid

    began = time.perf_counter()
    tier.signal(victim, signal.SIGKILL)
    if moment is None:
        await tier.until(noticed, 10)
    else:
        await tier.everywhere(survivors)
    seconds = time.perf_counter() - began
    sums = {tier.checksum(int(name.removeprefix("relay-")), tier.version) for name in survivors}
    await tier.until(noticed, 10)
    await tier.everywhere({*survivors, victim})  # it comes back, and gets the version
    return {"seconds": seconds, "completed": len(sums) == 1, "hit": under_way}


def _figures(rounds: list[dict[str, Any]], relays: int, mib: int) -> dict[str, Any]:
    during = sorted(entry["seconds"] for entry in rounds if entry["during_transfer"])
    idle = sorted(entry["seconds"] for entry in rounds if not entry["during_transfer"])
    return {
        "relays": relays,
        "mib": mib,
        "kills": len(rounds),
        "completed": sum(entry["completed"] for entry in rounds),
        "hit_a_transfer": sum(entry["hit"] for entry in rounds),
        "max_s": max(entry["seconds"] for entry in rounds),
        "during_median_s": median(during) if during else None,
        "during_max_s": during[-1] if during else None,
        "during_s": [round(seconds, 3) for seconds in during],
        "idle_noticed_median_s": median(idle) if idle else None,
        "idle_noticed_max_s": idle[-1] if idle else None,
        "by_place": {
            place: max(entry["seconds"] for entry in rounds if entry["place"] == place)
            for place in dict.fromkeys(entry["place"] for entry in rounds)
        },
    }


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table(title=f"{figures['kills']} kills, {figures['relays']} relays, {figures['mib']} MiB")
    for column in ("what", "figure"):
        table.add_column(column)
    table.add_row("completed by all survivors, bit-exact", f"{figures['completed']} of {figures['kills']}")
    table.add_row("hit a transfer under way", str(figures["hit_a_transfer"]))
    for name in ("during_median_s", "during_max_s", "idle_noticed_median_s", "idle_noticed_max_s"):
        if figures[name] is not None:
            table.add_row(name.removesuffix("_s").replace("_", " "), f"{figures[name]:.3f} s")
    for place, seconds in figures["by_place"].items():
        table.add_row(f"longest, {place}", f"{seconds:.3f} s")
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--relays", type=int, default=4)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = asyncio.run(measure_healing(options.kills, options.relays, options.mib))
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)


if __name__ == "__main__":
    main()

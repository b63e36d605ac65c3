"""How many tokens one controller takes in: the production code under modelled rollouts, over real, authenticated ZeroMQ.

    python benchmarks/controller.py [--rollouts 64 256 1024] [--trajectories 32] [--seconds 4] [--no-ray] [--json]

For each size a controller runs in a process of its own (uvloop, CURVE, heartbeats, rewards, groups, steps, the run
directory's files) against workers modelled by `--processes` other processes. Each rollout holds `--trajectories`
trajectories and sends 16 new tokens of each with every message. The first measurement has the pace of real rollouts (two
messages a second: 32 tokens/s and trajectory); then the offered rate is raised until the event loop's lag exceeds 10 ms at
p99, or the controller falls behind.

- tokens/s per CPU: tokens taken in per CPU second of the controller's process, ZeroMQ's own thread included. It says what
  one core carries, whatever else runs on the machine.
- lag: how late the loop wakes a coroutine that sleeps for 5 ms, in milliseconds. "own" leaves out the time for which the
  loop's thread waited for a CPU that ran something else (Linux's schedstat; "waited" is its share): on a machine that
  others use the lag is theirs, and the limit is held against the controller's own.
- memory: growth of the resident memory since before the first prompt, by the trajectories held (in progress or waiting
  to be trained).
- over Ray: tokens per CPU second of the controller, over those of one Ray actor to which the same batches go as calls
  and which does the bookkeeping of the deltas only (`controller_ray.py`). Of Ray, the actor's process alone is counted.

The figures at the top of the JSON object are of the highest rate within the limit (of the first rate if none is), at the
largest size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from controller_load import DELTA_INTERVAL_S, TOKENS_PER_DELTA
from controller_ray import measure_ray, require_ray
from controller_side import Options
from rich.console import Console
from rich.table import Table

LAG_LIMIT_S = 0.010
SIDE_LIMIT_S = 180.0
RATES = (250e3, 500e3, 750e3, 1e6, 1.25e6, 1.5e6, 1.75e6, 2e6, 2.5e6, 3e6, 4e6)  # tokens/s


def measure_size(rollouts: int, options: argparse.Namespace) -> dict[str, Any]:
    """All measurements with so many rollouts, the best one named."""
    paced = rollouts * options.trajectories * TOKENS_PER_DELTA / DELTA_INTERVAL_S
    with tempfile.TemporaryDirectory(prefix="laminar-benchmark-") as folder:
        side = Options(
            folder=folder,
            rollouts=rollouts,
            trajectories=options.trajectories,
            mean_tokens=options.mean_tokens,
            processes=options.processes,
            seconds=options.seconds,
            settle_s=options.settle,
            rates=[paced, *(rate for rate in options.rates if rate > 1.2 * paced)],
            lag_limit_s=LAG_LIMIT_S,
            profile=options.profile or "",
        )
        script = Path(__file__).with_name("controller_side.py")
        command = [sys.executable, str(script), json.dumps(asdict(side))]
        try:
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SIDE_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"the controller with {rollouts} rollouts had not finished after {SIDE_LIMIT_S:.0f} s: it takes in messages "
                "and gets to nothing else, or the machine has no CPU left for it"
            ) from None
    if result.returncode:
        raise SystemExit(f"the controller with {rollouts} rollouts ended with status {result.returncode}")
    size: dict[str, Any] = {"replicas": rollouts, **json.loads(result.stdout)}
    return {**size, "best": _best(size["levels"])}


def _best(levels: list[dict[str, float]]) -> dict[str, float]:
    """The highest rate that was taken in within the limit of the lag; the first if none was."""
    within = [
        level
        for level in levels
        if level["own_lag_p99_ms"] <= LAG_LIMIT_S * 1e3 and level["behind_tokens"] < level["tokens_per_s"] / 2
    ]
    return max(within, key=lambda level: level["tokens_per_s"], default=levels[0])


def report(sizes: list[dict[str, Any]], ray: dict[str, float] | None) -> dict[str, Any]:
    """The figures as they are printed by `--json`."""
    largest = max(sizes, key=lambda size: size["replicas"])
    best = largest["best"]
    return {
        "replicas": largest["replicas"],
        "tokens_per_s": best["tokens_per_s"],
        "tokens_per_cpu_s": best["tokens_per_cpu_s"],
        "loop_lag_p99_ms": best["loop_lag_p99_ms"],
        "own_lag_p99_ms": best["own_lag_p99_ms"],
        "cpu_wait_fraction": best["cpu_wait_fraction"],
        "bytes_per_trajectory": best["bytes_per_trajectory"],
        "tokens_per_trajectory": best["tokens_per_trajectory"],
        "over_ray": best["tokens_per_cpu_s"] / ray["tokens_per_cpu_s"] if ray else None,
        "ray": ray,
        "sizes": sizes,
    }


def show(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """The figures as a table."""
    console = Console()
    table = Table(
        title=f"one controller, {options.trajectories} trajectories per rollout (* = highest within the limit)"
    )
    load = ("rollouts", "k offered/s", "k tokens/s", "k per CPU s", "CPU")
    lag = ("lag p50", "p99", "own p99", "own max", "waited")
    columns = (*load, *lag, "ended/s", "KiB each")
    for column in columns:
        table.add_column(column, justify="right")
    for size in figures["sizes"]:
        for level in size["levels"]:
            mark = "*" if level == size["best"] else " "
            table.add_row(
                f"{mark} {size['replicas']}",
                f"{level['offered_tokens_per_s'] / 1e3:,.0f}",
                f"{level['tokens_per_s'] / 1e3:,.0f}",
                f"{level['tokens_per_cpu_s'] / 1e3:,.0f}",
                f"{level['cpu_fraction']:.0%}",
                f"{level['loop_lag_p50_ms']:.1f}",
                f"{level['loop_lag_p99_ms']:.1f}",
                f"{level['own_lag_p99_ms']:.1f}",
                f"{level['own_lag_max_ms']:.0f}",
                f"{level['cpu_wait_fraction']:.0%}",
                f"{level['finished_per_s']:.0f}",
                f"{level['bytes_per_trajectory'] / 1024:.1f}",
            )
        table.add_section()
    console.print(table)
    console.print(
        f"{figures['replicas']} rollouts: {figures['bytes_per_trajectory']:,.0f} bytes per trajectory held, of "
        f"{figures['tokens_per_trajectory']:.0f} tokens on average (8 bytes of payload each)"
    )
    if ray := figures["ray"]:
        console.print(
            f"Ray actor, same batches: {ray['tokens_per_s']:,.0f} tokens/s, {ray['tokens_per_cpu_s']:,.0f} per CPU s; "
            f"the controller takes in {figures['over_ray']:.2f} times as many per CPU s"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--trajectories", type=int, default=32, help="in flight per rollout")
    parser.add_argument("--mean-tokens", type=int, default=1024, help="of a response")
    parser.add_argument("--processes", type=int, default=2, help="that drive the modelled workers")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--settle", type=float, default=1.5, help="seconds before each measurement")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="tokens/s to offer after the first pace")
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--profile", help="file for a cProfile of the controller at the last of the rates")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    if options.trajectories < 8 or options.trajectories % 8:
        parser.error("--trajectories: a multiple of 8, the size of a group")
    if not options.no_ray:
        require_ray()
    sizes = [measure_size(rollouts, options) for rollouts in options.rollouts]
    ray = None
    if not options.no_ray:
        ray = measure_ray(
            rollouts=max(options.rollouts),
            trajectories=options.trajectories,
            mean_tokens=options.mean_tokens,
            processes=options.processes,
            seconds=options.seconds,
        )
    figures = report(sizes, ray)
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures, options)


if __name__ == "__main__":
    main()

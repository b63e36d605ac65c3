"""What the controller's journal costs: the same controller under the same load, with it and without it.

    python benchmarks/journal.py [--rollouts 64] [--trajectories 32] [--mean-tokens 1024] [--rounds 3] [--seconds 4] [--json]

Each round runs the production code twice (`controller_side.py`), in turn with and without, against modelled rollouts over real,
authenticated ZeroMQ: first at the pace of real rollouts, then at the highest rate that is offered. Figures are medians over
the rounds.

- bytes per trajectory: size of journal.sqlite at the end, by the trajectories that have finished; of these `8 * --mean-tokens`
  are the tokens and logprobs themselves. Nothing is forgotten here, as between two checkpoints.
- share of the controller's time: CPU seconds of the process (the journal's thread and ZeroMQ's included) that it takes more
  with a journal, at the pace of real rollouts, by those that it takes with one.
- throughput: tokens taken in per CPU second at the highest rate, with a journal over without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from controller_load import DELTA_INTERVAL_S, TOKENS_PER_DELTA
from controller_side import Options
from rich.console import Console
from rich.table import Table

SIDE_LIMIT_S = 180.0


def measure(options: argparse.Namespace, *, journal: bool) -> dict[str, Any]:
    """One run of the controller."""
    paced = options.rollouts * options.trajectories * TOKENS_PER_DELTA / DELTA_INTERVAL_S
    with tempfile.TemporaryDirectory(prefix="laminar-benchmark-") as folder:
        side = Options(
            folder=folder,
            rollouts=options.rollouts,
            trajectories=options.trajectories,
            mean_tokens=options.mean_tokens,
            processes=options.processes,
            seconds=options.seconds,
            settle_s=options.settle,
            rates=[paced, options.rate * paced],
            lag_limit_s=float("inf"),
            journal=journal,
        )
        script = Path(__file__).with_name("controller_side.py")
        # Infinity is no JSON, but Python reads what it writes.
        result = subprocess.run(
            [sys.executable, str(script), json.dumps(asdict(side))],
            stdout=subprocess.PIPE,
            text=True,
            timeout=SIDE_LIMIT_S,
            check=False,
        )
    if result.returncode:
        raise SystemExit(f"the controller ended with status {result.returncode}")
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def report(rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """Medians over rounds of (with, without)."""

    def of(name: str, level: int, side: int) -> float:
        return median(figures[side]["levels"][level][name] for figures in rounds)

    cpu = [
        1
        - (without["levels"][0]["cpu_fraction"] / without["levels"][0]["tokens_per_s"])
        / (with_["levels"][0]["cpu_fraction"] / with_["levels"][0]["tokens_per_s"])
        for with_, without in rounds
    ]
    throughput = [
        with_["levels"][-1]["tokens_per_cpu_s"] / without["levels"][-1]["tokens_per_cpu_s"] for with_, without in rounds
    ]
    journals = [with_["journal"] for with_, _ in rounds]
    return {
        "bytes_per_trajectory": median(j["bytes"] / max(1.0, j["trajectories"]) for j in journals),
        "transactions": median(j["transactions"] for j in journals),
        "share_of_controller_time": median(cpu),
        "throughput_ratio": median(throughput),
        "tokens_per_s": of("tokens_per_s", -1, 0),
        "tokens_per_cpu_s_with": of("tokens_per_cpu_s", -1, 0),
        "tokens_per_cpu_s_without": of("tokens_per_cpu_s", -1, 1),
        "own_lag_p99_ms_with": of("own_lag_p99_ms", 0, 0),
        "own_lag_p99_ms_without": of("own_lag_p99_ms", 0, 1),
    }


def show(figures: dict[str, float], options: argparse.Namespace) -> None:
    """The figures as a table."""
    table = Table(title=f"{options.rollouts} rollouts x {options.trajectories} trajectories, {options.rounds} rounds")
    table.add_column("")
    table.add_column("", justify="right")
    for name, text in (
        (
            "bytes per trajectory",
            f"{figures['bytes_per_trajectory']:,.0f} ({8 * options.mean_tokens:,} of them tokens)",
        ),
        ("share of the controller's time", f"{figures['share_of_controller_time']:.1%}"),
        ("throughput, with / without", f"{figures['throughput_ratio']:.3f}"),
        ("tokens per CPU s, with", f"{figures['tokens_per_cpu_s_with']:,.0f}"),
        ("tokens per CPU s, without", f"{figures['tokens_per_cpu_s_without']:,.0f}"),
        ("the loop's own lag p99, with", f"{figures['own_lag_p99_ms_with']:.1f} ms"),
        ("the loop's own lag p99, without", f"{figures['own_lag_p99_ms_without']:.1f} ms"),
    ):
        table.add_row(name, text)
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--trajectories", type=int, default=32, help="in flight per rollout")
    parser.add_argument("--mean-tokens", type=int, default=1024, help="of a response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="that drive the modelled workers")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--settle", type=float, default=1.5, help="seconds before each measurement")
    parser.add_argument("--rate", type=float, default=8.0, help="of the second measurement, in paces of real rollouts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    if options.trajectories < 8 or options.trajectories % 8:
        parser.error("--trajectories: a multiple of 8, the size of a group")
    rounds = [(measure(options, journal=True), measure(options, journal=False)) for _ in range(options.rounds)]
    figures = report(rounds)
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures, options)


if __name__ == "__main__":
    main()

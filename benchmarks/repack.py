"""What repack costs and gains: the planner's time, real runs with and without it, and simulated clusters.

    python benchmarks/repack.py [--parts planner real kv simulated] [--model models/tiny] [--engine torch] [--seeds 3]
                                [--first-seed 0] [--pace-ms 100] [--steps 16] [--study configs/simulation/repack.yaml] [--set ...] [--json]

- planner: 1024 rollouts, half of them draining, and how its time grows; CPU milliseconds, the best of several.
- real: `laminar train` with all its processes, three rollouts, the same lengths with and without repack (log-normal, 99th percentile
  10 x the median: `long_tail.py`). On a machine with fewer cores than rollouts these would slow each other, which GPUs do not:
  `--pace-ms` holds each decode step to a shortest time. The two runs of a seed are made at the same
  time, so that whatever else the machine does meets both.
- simulated: the study's clusters with and without repack, in virtual time.
- kv: the pause of a move with KV over one with a prefill, per context length, by `kv_moves.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from laminar.controller.repack_planner import RepackBounds, RolloutObservation, plan
from laminar.simulation.study.config import load_study
from laminar.simulation.study.run_study import simulate

PARTS = ("planner", "real", "kv", "simulated")
PLANNED = (64, 256, 1024, 4096)  # rollouts
ROUNDS = 7
PAPER = {"generation_gain": 0.26, "overhead_s": 0.69}
COMPARED = (
    "generated_tokens_per_s",
    "kv_utilization",
    "step_s",
    "until_new_weights_serve_s",
    "straggler_s_per_token",
    "straggler_s_per_token_p90",
)


def measure_planner() -> dict[str, Any]:
    """Milliseconds of CPU time per plan, by the number of rollouts."""
    bounds = RepackBounds(kv_ceiling=0.9, batch_bound=32, move_s_per_token=1e-5)
    times, moves = {}, {}
    for count in PLANNED:
        observations = _observations(count)
        best = float("inf")
        for _ in range(ROUNDS):
            began = time.process_time()
            made = plan(observations, bounds)
            best = min(best, time.process_time() - began)
        times[str(count)], moves[str(count)] = 1000 * best, len(made.moves)
    return {"planner_ms_1024": times["1024"], "planner_ms": times, "planner_moves": moves}


def _observations(count: int) -> list[RolloutObservation]:
    rng = np.random.default_rng(0)
    return [
        RolloutObservation(
            rollout=f"rollout-{index}",
            policy_version=int(rng.integers(2)),
            running=int(rng.integers(1, 32)),
            waiting=0,
            kv_utilization=float(rng.random()) * 0.9,
            previous_kv_utilization=1.0,
            previous_running=32,
            draining=bool(rng.random() < 0.5),
            context_tokens=int(rng.integers(1_000, 100_000)),
            drains_in_s=float(rng.random()) * 60,
        )
        for index in range(count)
    ]


def measure_real(options: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Figures with and without repack for each seed, and their ratios (with over without)."""
    from repack_run import Workload, run

    workload = Workload(
        model=options.model,
        engine=options.engine,
        steps=options.steps,
        pace_s=options.pace_ms / 1000,
    )
    seeds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="laminar-repack-") as folder:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            with ThreadPoolExecutor(2) as pool:
                runs = {
                    repack: pool.submit(run, workload, Path(folder) / f"{seed}-{repack}", repack=repack, seed=seed)
                    for repack in (False, True)
                }
            pair = {repack: future.result() for repack, future in runs.items()}
            progress(f"seed {seed}: {json.dumps(pair)}")
            ratios = {key: _ratio(pair[True][key], pair[False][key]) for key in COMPARED}
            seeds.append({"seed": seed, "without": pair[False], "with": pair[True], "ratios": ratios})
    gains = [seed["ratios"]["generated_tokens_per_s"] for seed in seeds]
    return {
        "real_throughput_gain": median(gains),
        "real_throughput_gains": gains,
        "real_kv_utilization": {
            which: median(seed[which]["kv_utilization"] for seed in seeds) for which in ("without", "with")
        },
        "real_until_new_weights_serve_s": {
            which: median(seed[which]["until_new_weights_serve_s"] for seed in seeds) for which in ("without", "with")
        },
        "real_straggler_latency_ratio": median(seed["ratios"]["straggler_s_per_token"] for seed in seeds),
        "real": {"engine": options.engine, "pace_ms": options.pace_ms, "steps": options.steps, "seeds": seeds},
    }


def _ratio(with_repack: float | None, without: float | None) -> float | None:
    return with_repack / without if with_repack is not None and without else None


def measure_simulated(study: Path, overrides: list[str]) -> dict[str, Any]:
    """Gain in generation throughput and the rest, per setting of the study."""
    result = simulate(load_study(study, overrides))
    settings = {}
    for off, on in result.repack_pairs():
        without, with_repack = off.record, on.record
        settings[f"{off.model}, {off.gpus} GPUs"] = {
            "generation_gain": with_repack.generated_tokens_per_s / without.generated_tokens_per_s - 1,
            "kv_utilization": {"without": without.kv_utilization, "with": with_repack.kv_utilization},
            "trajectory_p99_ratio": with_repack.trajectory_s.p99 / without.trajectory_s.p99,
            "moves": with_repack.repack.moves,
            "overhead_s": with_repack.repack.overhead_s,
        }
    return {
        "simulated_generation_gain": {name: figures["generation_gain"] for name, figures in settings.items()},
        "simulated": settings,
        "paper": PAPER,
    }


def measure_kv_moves(engine: str, model: str) -> dict[str, Any]:
    """`kv_move_over_reprefill` of the benchmark of KV moves, by context length; raises CalledProcessError if that fails."""
    benchmark = str(Path(__file__).with_name("kv_moves.py"))
    command = [sys.executable, benchmark, "--engines", engine, "--models", model, "--json"]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return {"kv_move_over_reprefill": json.loads(answer.stdout)["kv_move_over_reprefill"]}


def show(figures: dict[str, Any]) -> None:
    """The figures as tables."""
    console = Console(width=140)
    if "planner_ms" in figures:
        table = Table("rollouts", "moves", "CPU ms per plan", title="planner")
        for count, ms in figures["planner_ms"].items():
            table.add_row(count, str(figures["planner_moves"][count]), f"{ms:.2f}")
        console.print(table)
    if "real" in figures:
        table = Table("seed", *COMPARED, "moves", title="real runs, with repack over without")
        for seed in figures["real"]["seeds"]:
            table.add_row(str(seed["seed"]), *(_cell(seed, key) for key in COMPARED), str(seed["with"]["moves"]))
        console.print(table)
        console.print(f"median gain in generated tokens/s: {100 * (figures['real_throughput_gain'] - 1):+.0f} %")
    if "kv_move_over_reprefill" in figures:
        for name, ratios in figures["kv_move_over_reprefill"].items():
            table = Table("context", *ratios, title=f"pause with KV over pause with a prefill, {name}")
            table.add_row("ratio", *(f"{ratio:.2f}" for ratio in ratios.values()))
            console.print(table)
    if "simulated" in figures:
        table = Table(
            "setting",
            "generated tokens/s",
            "KV utilization",
            "p99 of a trajectory",
            "moves",
            "overhead s",
            title=f"simulated (the paper: {100 * PAPER['generation_gain']:+.0f} %, {PAPER['overhead_s']} s)",
        )
        for name, one in figures["simulated"].items():
            kv = one["kv_utilization"]
            table.add_row(
                name,
                f"{100 * one['generation_gain']:+.1f} %",
                f"{100 * kv['without']:.0f} -> {100 * kv['with']:.0f} %",
                f"{100 * (one['trajectory_p99_ratio'] - 1):+.0f} %",
                str(one["moves"]),
                f"{one['overhead_s']:.2f}",
            )
        console.print(table)


def _cell(seed: dict[str, Any], key: str) -> str:
    ratio = seed["ratios"][key]
    return "-" if ratio is None else f"{seed['without'][key]:.3g} -> {seed['with'][key]:.3g} ({ratio:.2f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--pace-ms", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--study", type=Path, default=Path("configs/simulation/repack.yaml"))
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the study")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    if "planner" in options.parts:
        figures |= measure_planner()
    if "real" in options.parts:
        figures |= measure_real(options, lambda text: print(text, file=sys.stderr, flush=True))
    if "kv" in options.parts:
        figures |= measure_kv_moves(options.engine, options.model)
    if "simulated" in options.parts:
        figures |= measure_simulated(options.study, options.set)
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)


if __name__ == "__main__":
    main()

"""Whether asynchrony costs learning: the quickstart's job under two schedules, the same samples, several seeds each.

    python benchmarks/equal_learning.py [--seeds 0 1 2 3 4] [--plot docs/equal_learning.svg] [--json]

Each run is `laminar train` as a user makes it. Wall time counts from the first step's start to the last step's end, so that
the start of the processes, which is the same for both, does not blur the comparison. The final reward is the mean of the last steps.
The runs take turns (a seed under one schedule, then under the other), so that a machine that gets slower is so for both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from line_plot import Line, Panel, line_plot
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
SCHEDULES = ("laminar", "synchronous")
LAST_STEPS = 5  # whose mean is the final reward
LIMIT_S = 900.0  # of one run
GRID = 40  # points of a curve over time


@dataclass(kw_only=True, slots=True, frozen=True)
class Learned:
    """One run."""

    rewards: list[float]  # of each step's batch
    times_s: list[float]  # at which each step had ended, since the first began

    @property
    def final(self) -> float:
        """Mean reward of the last steps."""
        return mean(self.rewards[-LAST_STEPS:])

    @property
    def seconds(self) -> float:
        """From the first step's start to the last step's end."""
        return self.times_s[-1]


def run(schedule: str, seed: int, engine: str, folder: Path) -> Learned:
    """Train once. Raises SystemExit if the run fails."""
    run_dir = folder / f"{schedule}-{seed}"
    changes = [f"schedule.name={schedule}", f"seed={seed}", f"rollout.engine={engine}"]
    if schedule == "synchronous":
        changes.append("schedule.max_staleness=0")
    command = [sys.executable, "-m", "laminar", "train", str(CONFIG), "--run-dir", str(run_dir)]
    for change in changes:
        command += ["--set", change]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if made.returncode:
        raise SystemExit(
            f"{' '.join(command)}: exit status {made.returncode}\n{made.stdout[-3000:]}{made.stderr[-3000:]}"
        )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "reward_mean" in line]
    began = steps[0]["time_s"] - steps[0]["step_s"]
    return Learned(rewards=[s["reward_mean"] for s in steps], times_s=[s["time_s"] - began for s in steps])


def figures(runs: dict[str, list[Learned]]) -> dict[str, Any]:
    """What `--json` prints."""
    result: dict[str, Any] = {}
    for schedule, learned in runs.items():
        finals = [one.final for one in learned]
        result[schedule] = {
            "final_rewards": finals,
            "final_reward_mean": mean(finals),
            "final_reward_stdev": stdev(finals) if len(finals) > 1 else 0.0,
            "seconds": [one.seconds for one in learned],
            "seconds_mean": mean(one.seconds for one in learned),
        }
    first, second = (result[schedule] for schedule in SCHEDULES)
    result["final_reward_difference"] = first["final_reward_mean"] - second["final_reward_mean"]
    result["wall_time_ratio"] = second["seconds_mean"] / first["seconds_mean"]
    return result


def plot(runs: dict[str, list[Learned]]) -> str:
    """Reward by step, and by the share of the slowest run's time, as SVG text."""
    steps = min(len(one.rewards) for learned in runs.values() for one in learned)
    longest = max(one.seconds for learned in runs.values() for one in learned)
    grid = [longest * index / GRID for index in range(1, GRID + 1)]
    by_step = [
        Line(
            name=schedule, xs=[step / steps for step in range(1, steps + 1)], each=[o.rewards[:steps] for o in learned]
        )
        for schedule, learned in runs.items()
    ]
    by_time = [
        Line(
            name=schedule,
            xs=[moment / longest for moment in grid],
            each=[[reward_at(one, moment) for moment in grid] for one in learned],
        )
        for schedule, learned in runs.items()
    ]
    panels = [
        Panel(title=f"by step (1 = step {steps})", lines=by_step),
        Panel(title=f"by time (1 = {longest:.0f} s)", lines=by_time),
    ]
    return line_plot(panels, x_title="share of the run", y_title="reward", y_range=(0.0, 1.0))


def reward_at(learned: Learned, moment_s: float) -> float:
    """Of the last step that had ended by then; of the first before it had ended."""
    ended = [reward for reward, time_s in zip(learned.rewards, learned.times_s, strict=True) if time_s <= moment_s]
    return ended[-1] if ended else learned.rewards[0]


def show(result: dict[str, Any], seeds: Sequence[int]) -> None:
    """The figures as a table."""
    table = Table(title=f"quickstart, seeds {', '.join(map(str, seeds))}")
    for column in ("schedule", "final reward", "+-", "seconds", "of each seed"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for schedule in SCHEDULES:
        one = result[schedule]
        finals = " ".join(f"{reward:.3f}" for reward in one["final_rewards"])
        deviation, seconds = one["final_reward_stdev"], one["seconds_mean"]
        table.add_row(schedule, f"{one['final_reward_mean']:.4f}", f"{deviation:.4f}", f"{seconds:.1f}", finals)
    Console().print(table)
    Console().print(
        f"final reward {result['final_reward_difference']:+.4f}; "
        f"{SCHEDULES[1]} takes {result['wall_time_ratio']:.2f} x the time of {SCHEDULES[0]}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch", help="torch starts sooner")
    parser.add_argument("--plot", type=Path, help="write the curves as SVG")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    runs: dict[str, list[Learned]] = {schedule: [] for schedule in SCHEDULES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for schedule in SCHEDULES:
                learned = run(schedule, seed, options.engine, Path(folder))
                runs[schedule].append(learned)
                text = f"{schedule}, seed {seed}: reward {learned.final:.4f} in {learned.seconds:.1f} s"
                print(text, file=sys.stderr, flush=True)
    result = figures(runs)
    if options.plot is not None:
        options.plot.write_text(plot(runs), encoding="utf-8")
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result, options.seeds)


if __name__ == "__main__":
    main()

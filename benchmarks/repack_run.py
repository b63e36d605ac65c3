"""Real runs of `laminar train` on a long-tailed workload, for `benchmarks/repack.py`: starts them, reads what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml
from long_tail import VARIABLE, Tail

ROLLOUT = Path(__file__).parent / "long_tailed_rollout.py"
ROOT = Path(__file__).parents[1]
START_S = 900.0  # until the run listens
RUN_S = 1800.0
LONG = 0.9  # quantile of the lengths above which a trajectory is a straggler


@dataclass(kw_only=True, slots=True, frozen=True)
class Workload:
    """One real run, but for repack."""

    model: str
    engine: str
    rollouts: int = 3
    steps: int = 16
    warm_up_steps: int = 3  # not measured
    cool_down_steps: int = 4  # not measured: what they train was generated before
    groups_per_step: int = 16
    group_size: int = 4
    max_running: int = 16
    median_tokens: int = 10
    longest_tokens: int = 120
    interval_s: float = 0.5
    pace_s: float = 0.1


def run(workload: Workload, folder: Path, *, repack: bool, seed: int) -> dict[str, Any]:
    """Figures of one run. Raises RuntimeError if it fails."""
    folder.mkdir(parents=True)
    config, run_dir = folder / "experiment.yaml", folder / "run"
    config.write_text(yaml.safe_dump(_experiment(workload, repack=repack, seed=seed)))
    tail = Tail(median=workload.median_tokens, p99=10 * workload.median_tokens, seed=seed, pace_s=workload.pace_s)
    environment = {**os.environ, VARIABLE: tail.variable(), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    train = [sys.executable, "-m", "laminar", "train", str(config), "--run-dir", str(run_dir)]
    with open(folder / "output.log", "w", encoding="utf-8") as output:
        controller = subprocess.Popen(train, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        try:
            _wait_for(run_dir / "connection.json", controller)
            with _rollouts(workload.rollouts, run_dir, environment, folder):
                status = controller.wait(RUN_S)
        finally:
            if controller.poll() is None:
                controller.kill()
                controller.wait()
    if status:
        raise RuntimeError(f"the run failed: {(folder / 'output.log').read_text()[-2000:]}")
    return figures(workload, run_dir)


def _experiment(workload: Workload, *, repack: bool, seed: int) -> dict[str, Any]:
    return {
        "name": f"repack-{os.getpid()}-{seed}-{'on' if repack else 'off'}",
        "seed": seed,
        "model": {"path": workload.model},
        "data": {
            "source": {"type": "reasoning_gym", "datasets": [{"name": "spell_backward"}]},
            "max_prompt_tokens": 160,
        },
        "reward": {"function": "reasoning_gym"},
        "rollout": {
            "engine": workload.engine,
            "replicas": workload.rollouts,
            "max_running": workload.max_running,
            "max_response_tokens": workload.longest_tokens,
            "kv_cache_mib": 64,
            "delta_interval_s": 0.2,
        },
        "relay": {"count": 2, "transport": "tcp"},
        "trainer": {
            "steps": workload.steps,
            "groups_per_step": workload.groups_per_step,
            "group_size": workload.group_size,
            "optimizer": {"learning_rate": 1e-6},
        },
        "repack": {"enabled": repack, "interval_s": workload.interval_s},
        "controller": {"start_timeout_s": START_S},
        "launch": {"rollouts": "manual"},
    }


def _wait_for(path: Path, controller: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not path.exists():
        if controller.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not begin to listen: {path} is not there")
        time.sleep(0.1)


@contextmanager
def _rollouts(count: int, run_dir: Path, environment: dict[str, str], folder: Path) -> Iterator[None]:
    workers = []
    try:
        for index in range(count):
            command = [sys.executable, str(ROLLOUT), "--connect", str(run_dir), "--index", str(index)]
            with open(folder / f"rollout-{index}.log", "w", encoding="utf-8") as output:
                workers.append(
                    subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
                )
        yield
    finally:
        for worker in workers:
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


# ---------------------------------------------------------------- what a run leaves behind


def figures(workload: Workload, run_dir: Path) -> dict[str, Any]:
    """Means over the measured steps of a run directory."""
    lines = _lines(run_dir / "metrics.jsonl")
    measured = lines[workload.warm_up_steps : len(lines) - workload.cool_down_steps]
    seconds = sum(line["step_s"] for line in measured)
    events = _lines(run_dir / "events.jsonl")
    trajectories = [line for line in _lines(run_dir / "trajectories.jsonl") if line["dropped"] is None]
    return {
        "generated_tokens_per_s": sum(line["generated_tokens_per_s"] * line["step_s"] for line in measured) / seconds,
        "kv_utilization": sum(line["kv_utilization_mean"] * line["step_s"] for line in measured) / seconds,
        "step_s": seconds / len(measured),
        "until_new_weights_serve_s": _until_served(events, measured),
        "straggler_s_per_token": _straggler_s_per_token(trajectories),
        "straggler_s_per_token_p90": _straggler_s_per_token(trajectories, 0.9),
        "moves": sum(line["repack_moves"] for line in measured),
        "trajectories_moved": sum(line["repack_trajectories"] for line in measured),
        "tokens_moved": sum(line["repack_tokens"] for line in measured),
        **_kv(events, measured),
        "gained_tokens": sum(line["repack_gained_tokens"] for line in measured),
        "pause_s": _mean([line["repack_pause_s_mean"] for line in measured if line["repack_pause_s_mean"] is not None]),
    }


def _kv(events: list[dict[str, Any]], measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the moves of the measured steps: KV that came along, and tokens that were prefilled again."""
    start, end = measured[0]["time_s"] - measured[0]["step_s"], measured[-1]["time_s"]
    during = [event for event in events if start < event["time_s"] <= end]
    moved = [event for event in during if event["event"] == "KvMoved"]
    settled = [event for event in during if event["event"] == "RepackSettled"]
    return {
        "kv_moves": sum(1 for event in moved if not event["error"]),
        "kv_bytes": sum(event["nbytes"] for event in moved),
        "kv_refused": sum(1 for event in moved if event["error"]),
        "kv_tokens": sum(event["kv_tokens"] for event in settled),
        "prefilled_tokens": sum(event["tokens"] - event["kv_tokens"] for event in settled),
    }


def _until_served(events: list[dict[str, Any]], measured: list[dict[str, Any]]) -> float | None:
    """Mean seconds from a publish until a rollout serves that version or a newer one, over rollouts and versions."""
    versions = {line["policy_version"] for line in measured}
    waits: list[float] = []
    for published in events:
        if published["event"] != "WeightsPublished" or published["policy_version"] not in versions:
            continue
        first: dict[str, float] = {}
        for pulled in events:
            if pulled["event"] == "WeightsPulled" and pulled["policy_version"] >= published["policy_version"]:
                first.setdefault(pulled["rollout"], pulled["time_s"] - published["time_s"])
        waits += first.values()
    return _mean(waits)


def _straggler_s_per_token(trajectories: list[dict[str, Any]], quantile: float = 0.5) -> float | None:
    """Seconds per token of the longest trajectories: those that repack moves."""
    lengths = sorted(line["response_tokens"] for line in trajectories)
    border = lengths[int(LONG * len(lengths))]
    paces = sorted(
        line["generation_s"] / line["response_tokens"] for line in trajectories if line["response_tokens"] >= border
    )
    return median(paces) if quantile == 0.5 else paces[int(quantile * (len(paces) - 1))]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _mean(values: list[float]) -> float | None:
    return mean(values) if values else None

"""The controller's benchmark runs, at a size that takes seconds, and its figures hang together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(60)
def test_it_takes_in_all_that_two_rollouts_send():
    options = "--rollouts 2 --trajectories 8 --mean-tokens 64 --seconds 1 --settle 0.2 --processes 1 --no-ray --json"
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks/controller.py", *options.split(), "--rates", "2000"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["replicas"] == 2
    assert figures["over_ray"] is None
    levels = figures["sizes"][0]["levels"]
    assert levels[0]["asked_tokens_per_s"] == 512  # 2 rollouts, 8 trajectories, 32 tokens/s
    for level in levels:
        assert level["tokens_per_s"] > 0
        assert level["finished_per_s"] > 0
        assert level["behind_tokens"] < level["offered_tokens_per_s"]
        assert level["tokens_per_s"] == pytest.approx(level["tokens_per_cpu_s"] * level["cpu_fraction"])
        assert 0 <= level["own_lag_p99_ms"] <= level["loop_lag_p99_ms"] <= level["loop_lag_max_ms"]
    assert figures["tokens_per_s"] in [level["tokens_per_s"] for level in levels]
    assert figures["bytes_per_trajectory"] > 0

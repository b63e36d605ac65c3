"""The launch scripts: what they say to a mistake, and a run whose every part they started by hand on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.tiny_models import make_model

ROOT = Path(__file__).parents[2]
SCRIPTS = ("relays.sh", "trainer.sh", "rollouts.sh", "environments.sh")


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "LAMINAR_PYTHON": sys.executable, **changes}


def call(script: str, *arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / "launch" / script), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment(**changes), cwd=ROOT, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_wrong_call_shows_the_usage(script):
    done = call(script)
    assert done.returncode == 2
    assert f"{script} RUN_DIR" in done.stderr
    assert "laminar train CONFIG --run-dir RUN_DIR" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_controller_that_is_not_there_is_waited_for_and_named(script, tmp_path):
    done = call(script, tmp_path / "none", 1, WAIT_S="1")
    assert done.returncode == 2
    assert f"{tmp_path}/none/connection.json did not appear within 1 s" in done.stderr
    assert "laminar train" in done.stderr


def test_a_python_that_is_not_there(tmp_path):
    done = call("rollouts.sh", tmp_path, 1, LAMINAR_PYTHON="/no/python")
    assert done.returncode == 2
    assert "LAMINAR_PYTHON: /no/python" in done.stderr


@pytest.fixture
def published(tmp_path):
    """A run directory of a controller that was there."""
    (tmp_path / "connection.json").write_text(json.dumps({"run_id": "none-00000000"}))
    return tmp_path


def test_relays_want_a_host_each(published):
    hosts = published / "hosts"
    assert f"{hosts}: no such hostfile" in call("relays.sh", published, 2, hosts).stderr
    hosts.write_text("# the trainer's first\nalpha\n\n")
    done = call("relays.sh", published, 2, hosts)
    assert done.returncode == 2
    assert f"{hosts}: 1 hosts for 2 relays" in done.stderr


def test_replicas_want_their_gpus(published):
    done = call("rollouts.sh", published, 2, CUDA_VISIBLE_DEVICES="0,1,2", GPUS_PER_REPLICA="2")
    assert done.returncode == 2
    assert "2 replicas of 2 GPUs on a host with 3" in done.stderr


def test_replicas_get_their_indices_and_gpus(published):
    """A stand-in for python prints what each worker was started with."""
    stand_in = published / "python"
    stand_in.write_text('#!/bin/sh\ncase "$1" in -c) echo none;; *) echo "$CUDA_VISIBLE_DEVICES: $*";; esac\n')
    stand_in.chmod(0o755)
    variables = {"LAMINAR_PYTHON": str(stand_in), "CUDA_VISIBLE_DEVICES": "4,5,6,7", "GPUS_PER_REPLICA": "2"}
    module = f"-m laminar.workers.rollout.main --connect {published} --index"
    done = call("rollouts.sh", published, 2, 6, **variables)
    assert sorted(done.stdout.splitlines()) == [f"4,5: {module} 6", f"6,7: {module} 7"]
    done = call("rollouts.sh", published, 2, SLURM_PROCID="3", **variables)
    assert sorted(done.stdout.splitlines()) == [f"4,5: {module} 6", f"6,7: {module} 7"]


def test_the_status_is_that_of_a_worker_that_failed(published):
    stand_in = published / "python"
    stand_in.write_text('#!/bin/sh\ncase "$*" in *"--index 1") exit 3;; esac\n')
    stand_in.chmod(0o755)
    assert call("environments.sh", published, 3, LAMINAR_PYTHON=str(stand_in)).returncode == 3


def test_a_run_whose_parts_were_all_started_by_hand(tmp_path):
    model = make_model(tmp_path / "model", seed=0)
    run_dir = tmp_path / "run"
    tree = {
        "name": f"by-hand-{os.getpid()}",
        "model": {"path": str(model)},
        "data": {
            "source": {"type": "reasoning_gym", "datasets": [{"name": "spell_backward"}]},
            "max_prompt_tokens": 200,
        },
        "rollout": {"engine": "torch", "max_running": 16, "max_response_tokens": 8},
        "trainer": {"steps": 2, "groups_per_step": 2, "group_size": 2},
        "launch": dict.fromkeys(("trainer", "relays", "rollouts", "environments"), "manual"),
    }
    config = tmp_path / "by_hand.yaml"
    config.write_text(yaml.safe_dump(tree))
    launch = ROOT / "scripts" / "launch"
    commands = {
        "controller": [sys.executable, "-m", "laminar", "train", config, "--run-dir", run_dir],
        "relays": ["bash", launch / "relays.sh", run_dir, 2],
        "trainer": ["bash", launch / "trainer.sh", run_dir, 1],
        "rollouts": ["bash", launch / "rollouts.sh", run_dir, 2],
        "environments": ["bash", launch / "environments.sh", run_dir, 1],
    }

    outputs = {name: tmp_path / f"{name}.txt" for name in commands}
    processes = {}
    deadline = time.monotonic() + 240
    try:
        for name, command in commands.items():
            with outputs[name].open("wb") as output:
                processes[name] = subprocess.Popen(
                    [str(word) for word in command],
                    stdout=output,
                    stderr=output,
                    env=environment(OMP_NUM_THREADS="1"),
                    cwd=ROOT,
                )
        statuses = {name: process.wait(deadline - time.monotonic()) for name, process in processes.items()}
    except subprocess.TimeoutExpired as error:
        statuses = {"did not end": error.cmd}
    finally:
        for process in processes.values():
            process.terminate()
    texts = "\n".join(f"== {name}\n{output.read_text()[-3000:]}" for name, output in outputs.items())
    assert statuses == dict.fromkeys(commands, 0), texts
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert {path.name for path in (run_dir / "logs").glob("*-*.log")} >= {
        *("relay-0.log", "relay-1.log", "trainer-0.log", "rollout-0.log", "rollout-1.log", "environment-0.log")
    }
    assert list(Path("/dev/shm").glob(f"*by-hand-{os.getpid()}*")) == []

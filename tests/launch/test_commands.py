"""Command lines of the processes of a run."""

from pathlib import Path

import pytest

from laminar.launch import commands
from tests.controller.fake_workers import experiment

RUN = Path("/run/dir")


def test_every_worker_is_started_once():
    config = experiment(trainer__ranks=2, rollout__replicas=3, reward__workers=2)
    started = [name for command in commands.local_commands(config, RUN, "r") for name in command.workers]
    assert sorted(started) == sorted(commands.expected_workers(config))


@pytest.mark.parametrize("part", ["trainer", "relays", "rollouts", "environments"])
def test_what_is_manual_is_not_started(part):
    config = experiment(**{f"launch__{part}": "manual"})
    kind = part.removesuffix("s")
    names = [name for command in commands.local_commands(config, RUN, "r") for name in command.workers]
    assert not any(name.startswith(kind) for name in names)
    assert set(commands.expected_workers(config)) - set(names) == {
        name for name in commands.expected_workers(config) if name.startswith(kind)
    }


def test_rollouts_with_degrees_of_their_own_get_as_many_gpus(monkeypatch):
    monkeypatch.setattr(commands.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    config = experiment(trainer__ranks=1, rollout__replicas=3, rollout__tensor_parallel=[1, 4, 2])
    devices = {
        command.name: command.environment.get("CUDA_VISIBLE_DEVICES")
        for command in commands.local_commands(config, RUN, "r")
    }
    assert [devices[f"rollout-{index}"] for index in range(3)] == ["1", "2,3,4,5", "6,7"]


def test_gpus_are_shared_out_trainer_first(monkeypatch):
    monkeypatch.setattr(commands.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = experiment(trainer__ranks=2, rollout__replicas=2)
    devices = {
        command.name: command.environment.get("CUDA_VISIBLE_DEVICES")
        for command in commands.local_commands(config, RUN, "r")
    }
    assert devices["torchrun"] == "4,5"
    assert (devices["rollout-0"], devices["rollout-1"]) == ("6", "7")
    assert devices["environment-0"] == ""


def test_processes_that_are_too_many_share_the_last_gpu(monkeypatch):
    monkeypatch.setattr(commands.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for command in commands.local_commands(experiment(), RUN, "r"):
        if command.name.startswith("rollout"):
            assert command.environment["CUDA_VISIBLE_DEVICES"] == "0"

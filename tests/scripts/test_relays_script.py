"""scripts/launch/relays.sh with stand-ins for mpirun and python: when relays are started, again or not, and how."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.weights import run_memory

ROOT = Path(__file__).parents[2]

# Says what each relay world was started with; ends with the statuses of the file `statuses` in turn.
MPIRUN = """#!/bin/sh
case "$*" in *laminar.workers.relay.main*) ;; *) echo "$*" >>{folder}/cleaned; exit 0;; esac
echo "$*" >>{folder}/worlds
status=$(head -n 1 {folder}/statuses)
sed -i 1d {folder}/statuses
[ "$status" != run-ends ] || {{ rm {folder}/connection.json; exit 7; }}
[ "$status" != next-run ] || {{ sed -i s/none-0/none-1/ {folder}/connection.json; exit 7; }}
[ "$status" != stay ] || {{ echo here; exec sleep 60; }}
exit "$status"
"""
PYTHON = """#!/bin/sh
case "$*" in
*mpi_installation*) echo "$*" >>{folder}/checked; exit ${{CHECK:-0}};;
*relay.main*) echo "$*" >>{folder}/singles; exit ${{SINGLE:-0}};;
esac
exec {python} "$@"
"""


class Desk:
    """A run directory with the stand-ins in it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def command(self, *arguments: object) -> list[str]:
        return ["bash", str(ROOT / "scripts" / "launch" / "relays.sh"), str(self.folder), *map(str, arguments)]

    def environment(self, **variables: str) -> dict[str, str]:
        return {**os.environ, "LAMINAR_PYTHON": str(self.folder / "python"), **variables}

    def run(self, *arguments: object, statuses: str = "0", **variables: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "statuses").write_text("\n".join(statuses.split()) + "\n")
        environment = self.environment(**variables)
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT, check=False
        )

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def desk(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as controller:
        address = f"tcp://127.0.0.1:{controller.getsockname()[1]}"
        (tmp_path / "connection.json").write_text(json.dumps({"run_id": "none-0", "address": address}))
        for name, text in (("mpirun", MPIRUN), ("python", PYTHON)):
            (tmp_path / name).write_text(text.format(folder=tmp_path, python=sys.executable))
            (tmp_path / name).chmod(0o755)
        yield Desk(tmp_path)


def test_relays_that_are_dismissed_are_not_started_again(desk):
    assert desk.run(3).returncode == 0
    (world,) = desk.lines("worlds")
    assert world.startswith("--with-ft ulfm --oversubscribe")
    assert "-n 3" in world
    assert world.endswith(f"-m laminar.workers.relay.main --connect {desk.folder}")
    assert len(desk.lines("cleaned")) == 1


def test_killed_ones_are_while_the_run_lives(desk):
    done = desk.run(2, statuses="137 1 0")
    assert done.returncode == 0
    first, second, third = desk.lines("worlds")
    for world, attempt in ((first, 0), (second, 1), (third, 2)):
        assert f"btl_sm_backing_directory /dev/shm/laminar-none-0/mpi-{attempt} " in world
    assert "rm -rf '/dev/shm/laminar-none-0/mpi-1'; mkdir -p '/dev/shm/laminar-none-0/mpi-2'" in third
    assert "mpirun ended with status 137, but the run is alive" in done.stderr
    assert len(desk.lines("cleaned")) == 1  # not between the attempts: the stores are attached again


@pytest.mark.parametrize("restarts", [0, 2])
def test_but_not_for_ever(desk, restarts):
    done = desk.run(2, statuses="4 4 4 4", RESTARTS=str(restarts))
    assert done.returncode == 4
    assert len(desk.lines("worlds")) == 1 + restarts
    assert f"RESTARTS ({restarts}) are used up" in done.stderr


@pytest.mark.parametrize("end", ["run-ends", "next-run"])
def test_they_end_with_the_run(desk, end):
    assert desk.run(2, statuses=end).returncode == 7
    assert len(desk.lines("worlds")) == 1


def test_they_end_with_a_controller_that_was_killed(desk):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    (desk.folder / "connection.json").write_text(json.dumps({"run_id": "none-0", "address": f"tcp://127.0.0.1:{port}"}))
    assert desk.run(2, statuses="9").returncode == 9
    assert len(desk.lines("worlds")) == 1


def test_a_signal_ends_mpirun_for_good(desk):
    (desk.folder / "statuses").write_text("stay\n0\n")
    with subprocess.Popen(
        desk.command(2), stdout=subprocess.PIPE, text=True, env=desk.environment(), cwd=ROOT
    ) as script:
        assert script.stdout.readline() == "here\n"
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=30) == 128 + signal.SIGTERM
    assert len(desk.lines("worlds")) == 1
    assert len(desk.lines("cleaned")) == 1


def test_the_mpi_is_checked_first(desk):
    assert desk.run(2, CHECK="2").returncode == 2
    assert desk.lines("worlds") == []
    assert desk.run(2, FAULT_TOLERANT="0").returncode == 0
    assert desk.lines("checked")[1].endswith("--without-fault-tolerance")
    assert "--with-ft" not in desk.lines("worlds")[0]


def test_a_single_relay_needs_no_mpirun(desk):
    assert desk.run("--index", 5).returncode == 0
    assert desk.lines("singles") == [f"-m laminar.workers.relay.main --connect {desk.folder} --index 5"]
    assert desk.lines("worlds") == desk.lines("checked") == []
    assert desk.run("--index", 5, SINGLE="3").returncode == 3


def test_a_single_relay_leaves_its_versions_only_when_it_dies(desk):
    run_id = f"none-{os.getpid()}"
    connection = json.loads((desk.folder / "connection.json").read_text())
    (desk.folder / "connection.json").write_text(json.dumps(connection | {"run_id": run_id}))
    folder = run_memory.run_directory(run_id)
    attach = f"from laminar.weights.run_memory import attach; attach({run_id!r})"
    try:
        subprocess.run([sys.executable, "-c", attach], check=True, timeout=60, cwd=ROOT)
        desk.run("--index", 5, SINGLE="3")
        assert folder.exists()
        desk.run("--index", 5)
        assert not folder.exists()
        run_memory.attach(run_id)  # the controller's own host
        desk.run("--index", 5)
        assert folder.exists()
    finally:
        run_memory.remove(run_id)


def test_a_single_relay_wants_its_index(desk):
    done = desk.run("--index")
    assert done.returncode == 2
    assert "relays.sh RUN_DIR --index INDEX" in done.stderr

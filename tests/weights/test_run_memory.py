from __future__ import annotations

import os
import subprocess
import sys

import pytest

from laminar.errors import UserError
from laminar.weights import run_memory

CLAIM = (
    "import sys; from pathlib import Path; from laminar.weights import run_memory\n"
    "print(run_memory.claim(sys.argv[1], Path(sys.argv[2])), flush=True); sys.stdin.read()"
)


def start_owner(run_id, base):
    """A process that has claimed the run's memory and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, run_id, base], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == str(base / f"laminar-{run_id}")
    return process


def kill(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_leftovers_of_dead_runs_go_and_live_runs_stay(shared_memory):
    dead, live = start_owner("dead", shared_memory), start_owner("live", shared_memory)
    (shared_memory / "laminar-dead" / "relay-0").mkdir()
    (shared_memory / "laminar-dead" / "relay-0" / "version-00000001.weights").write_bytes(b"x")
    kill(dead)
    try:
        assert run_memory.remove_leftovers(shared_memory) == ["laminar-dead"]
        assert names(shared_memory) == ["laminar-live"]
        assert run_memory.remove_leftovers(shared_memory) == []
    finally:
        kill(live)


def test_a_zombie_owner_is_dead(shared_memory):
    owner = start_owner("run", shared_memory)
    owner.kill()
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped
    assert run_memory.remove_leftovers(shared_memory) == ["laminar-run"]
    kill(owner)


def test_a_reused_pid_does_not_keep_a_dead_runs_memory(shared_memory):
    directory = run_memory.claim("run", shared_memory)
    pid, started, namespace = (directory / "owner").read_text().split()
    (directory / "owner").write_text(f"{pid} {int(started) - 1} {namespace}\n")
    assert run_memory.remove_leftovers(shared_memory) == ["laminar-run"]


def test_an_owner_in_another_pid_namespace_is_not_judged(shared_memory):
    directory = run_memory.claim("run", shared_memory)
    _, started, namespace = (directory / "owner").read_text().split()
    (directory / "owner").write_text(f"999999999 {started} {int(namespace) + 1}\n")
    assert run_memory.remove_leftovers(shared_memory) == []


@pytest.mark.parametrize("name", ["laminar-unclaimed", "other", ".laminar-odd"])
def test_what_nobody_claimed_stays(shared_memory, name):
    (shared_memory / name).mkdir()
    (shared_memory / name / "data").write_text("")
    assert run_memory.remove_leftovers(shared_memory) == []
    assert names(shared_memory) == [name]


def test_files_and_links_are_left_alone(shared_memory):
    target = shared_memory / "elsewhere"
    target.mkdir()
    (target / "owner").write_text("999999999 1 1\n")
    (shared_memory / "laminar-link").symlink_to(target)
    (shared_memory / "laminar-file").write_text("")
    assert run_memory.remove_leftovers(shared_memory) == []


def test_a_removal_that_was_killed_half_way_is_finished_by_the_next(shared_memory):
    owner = start_owner("run", shared_memory)
    identity = (shared_memory / "laminar-run" / "owner").read_text().strip()
    half = shared_memory / f".laminar-old~0~{identity}"
    half.mkdir()
    (half / "data").write_text("")
    assert run_memory.remove_leftovers(shared_memory) == []
    kill(owner)
    assert run_memory.remove_leftovers(shared_memory) == [half.name, "laminar-run"]
    assert names(shared_memory) == []


def test_a_live_runs_id_is_refused_and_a_dead_ones_is_taken_over(shared_memory):
    owner = start_owner("run", shared_memory)
    with pytest.raises(UserError, match="still alive"):
        run_memory.claim("run", shared_memory)
    (shared_memory / "laminar-run" / "old").write_text("")
    kill(owner)
    directory = run_memory.claim("run", shared_memory)
    assert names(directory) == ["owner"]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert names(shared_memory) == ["laminar-run"]


def test_attach_claims_only_where_nobody_has(shared_memory):
    owner = start_owner("run", shared_memory)
    claimed = (shared_memory / "laminar-run" / "owner").read_text()
    assert run_memory.attach("run", shared_memory) == shared_memory / "laminar-run"
    assert (shared_memory / "laminar-run" / "owner").read_text() == claimed
    kill(owner)
    mine = run_memory.attach("other", shared_memory)
    assert (mine / "owner").read_text().split()[0] == str(os.getpid())


def test_remove_may_be_repeated(shared_memory):
    directory = run_memory.claim("run", shared_memory)
    (directory / "relay-0").mkdir()
    run_memory.remove("run", shared_memory)
    run_memory.remove("run", shared_memory)
    assert names(shared_memory) == []


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", ".hidden", "x" * 101])
def test_a_run_id_is_a_plain_name(run_id, shared_memory):
    with pytest.raises(ValueError, match="run id"):
        run_memory.claim(run_id, shared_memory)

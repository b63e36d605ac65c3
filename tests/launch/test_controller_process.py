"""The limits that the controller's process sets for itself."""

import gc
import resource
import subprocess
import sys

import pytest

from laminar.errors import UserError
from laminar.launch import controller_process


@pytest.fixture
def limit(monkeypatch):
    """The limit of open files as `resource` reports it; a list of [soft, hard]."""
    limit = [256, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limit.__setitem__(slice(None), new))
    monkeypatch.setattr(gc, "set_threshold", lambda *thresholds: None)
    return limit


@pytest.mark.parametrize("workers, soft", [(10, 1034), (3000, 4024), (3900, 4096)])
def test_as_many_open_files_as_workers_and_some(limit, workers, soft):
    controller_process.prepare(workers)
    assert limit == [soft, 4096]


def test_a_limit_that_is_high_enough_stays(limit):
    limit[:] = [2048, 4096]
    controller_process.prepare(100)
    assert limit == [2048, 4096]
    limit[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    controller_process.prepare(5000)
    assert limit == [resource.RLIM_INFINITY, resource.RLIM_INFINITY]


def test_more_workers_than_connections_are_the_users_to_change(limit):
    with pytest.raises(UserError, match=r"rollout.replicas: 5000 workers .* 4096 files open \(ulimit -Hn\). Raise"):
        controller_process.prepare(5000)
    assert limit == [256, 4096]


def test_full_collections_become_rare():
    script = (
        "import gc; from laminar.launch.controller_process import prepare; prepare(1); gc.collect()\n"
        "full = gc.get_stats()[2]['collections']; young = gc.get_stats()[0]['collections']\n"
        "kept = [[] for _ in range(3_000_000)]\n"
        "print(gc.get_stats()[0]['collections'] - young, gc.get_stats()[2]['collections'] - full)"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50
    ).stdout
    young, full = map(int, output.split())
    assert young > 100
    assert full == 0

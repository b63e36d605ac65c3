"""The ways that the relays are measured against do the job, and a way that does not is found out."""

from __future__ import annotations

import os

import peer_job
import pytest
import weights_peers

from laminar.errors import UserError

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("name", weights_peers.PEERS)
def test_a_peer_carries_all_bytes_to_all_receivers(name, tmp_path):
    if reason := weights_peers.absent(name):
        pytest.skip(reason)
    seconds = weights_peers.measure_peer(name, [3], mib=3, repeats=1, folder=tmp_path)
    assert seconds.keys() == {3}
    assert 0 < seconds[3] < 30
    assert list(tmp_path.iterdir()) == []


def nothing_travels(place, words):
    return lambda: words


def a_receiver_dies(place, words):
    return lambda: os._exit(3) if place.index else words


def test_bytes_that_do_not_arrive_are_noticed(tmp_path):
    with pytest.raises(RuntimeError, match="nothing-1 does not hold the bytes of round 0"):
        peer_job.measure("nothing", nothing_travels, 2, 1, 1, tmp_path)


def test_a_process_that_dies_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="dead-1 ended with 3"):
        peer_job.measure("dead", a_receiver_dies, 2, 1, 1, tmp_path)


def test_what_is_missing_is_said_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install redis-server" in weights_peers.absent("redis")
    with pytest.raises(UserError, match="apt-get install redis-server"):
        weights_peers.measure_peer("redis", [2], 1, 1)
    with pytest.raises(ValueError, match="expected one of gloo, zeromq, redis, files"):
        weights_peers.absent("carrier pigeon")


def test_a_copy_takes_time():
    assert weights_peers.measure_copy(4, 3) > 0

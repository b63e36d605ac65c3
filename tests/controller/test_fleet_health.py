"""The state machine of the rollouts, with a clock that the tests move."""

import pytest

from laminar.controller.fleet_health import FAILURE_WINDOW_S, FleetHealth, Health


def fleet(count=2, hosts=("a",), **settings):
    health = FleetHealth(**{"restarts": 2, "host_failures": 100, "suspect_after_s": 5.0} | settings)
    for index in range(count):
        health.starts(f"rollout-{index}", 0.0)
        health.came(f"rollout-{index}", hosts[index % len(hosts)], 1.0)
    return health


def serving(**settings):
    health = fleet(**settings)
    for name in health.members:
        health.serves(name, 2.0)
    return health


def test_a_rollout_takes_work_only_when_it_has_weights():
    health = fleet()
    assert not health.takes_work("rollout-0")
    health.serves("rollout-0", 2.0)
    assert health.takes_work("rollout-0") and not health.takes_work("rollout-1")


def test_one_that_was_lost_takes_work_only_when_it_has_weights_again():
    health = serving()
    assert health.lost("rollout-0", 10.0, "killed") is Health.RESTARTING
    assert not health.takes_work("rollout-0")
    health.serves("rollout-0", 11.0)  # late word of the process before
    assert not health.takes_work("rollout-0")
    health.came("rollout-0", "a", 12.0)
    assert health.health("rollout-0") is Health.STARTING and not health.takes_work("rollout-0")
    health.serves("rollout-0", 13.0)
    assert health.takes_work("rollout-0")


def test_silence_makes_a_suspect_and_a_word_clears_it():
    health = serving()
    assert not health.heard("rollout-0", 10.0, 15.0)
    assert health.heard("rollout-0", 10.0, 15.1)
    assert health.health("rollout-0") is Health.SUSPECT and not health.takes_work("rollout-0")
    assert not health.heard("rollout-0", 10.0, 16.0)  # no news
    assert health.heard("rollout-0", 16.5, 17.0)
    assert health.takes_work("rollout-0")


def test_silence_of_one_that_leaves_or_starts_changes_nothing():
    health = fleet()
    assert not health.heard("rollout-0", 0.0, 100.0)
    health.serves("rollout-0", 2.0)
    health.leaves("rollout-0", 3.0, "drained")
    assert not health.heard("rollout-0", 0.0, 100.0)
    assert health.health("rollout-0") is Health.DRAINING


def test_after_so_many_failures_a_rollout_is_evicted():
    health = serving(restarts=2)
    assert [health.lost("rollout-0", when, "killed") for when in (10.0, 20.0)] == [Health.RESTARTING] * 2
    assert health.lost("rollout-0", 30.0, "killed") is Health.EVICTED
    assert health.members["rollout-0"].reason == "killed (rollout.restarts is used up)"
    assert "rollout-0 is evicted" in health.refusal("rollout-0", "a")
    assert health.refusal("rollout-1", "a") == ""


def test_failures_are_forgiven_after_a_while():
    health = serving(restarts=1)
    for number in range(5):
        when = 10.0 + number * FAILURE_WINDOW_S
        assert health.lost("rollout-0", when, "killed") is Health.RESTARTING
        health.came("rollout-0", "a", when + 1)
        health.serves("rollout-0", when + 2)
    assert health.lost("rollout-0", when + 3, "killed") is Health.EVICTED


def test_a_host_whose_rollouts_fail_too_often_is_evicted_and_nobody_from_there_let_in():
    health = serving(count=4, hosts=("a", "b"), host_failures=2)
    health.lost("rollout-0", 10.0, "killed")
    health.lost("rollout-2", 11.0, "killed")
    assert health.evicted_hosts == {}
    assert health.lost("rollout-0", 12.0, "did not come back") is Health.EVICTED
    assert health.evicted_hosts == {"a": "3 losses of rollouts within an hour (rollout.host_failures)"}
    assert health.of_host("a") == ["rollout-2"]  # to be sent away
    assert "the host a is evicted" in health.refusal("rollout-9", "a")
    assert health.refusal("rollout-9", "b") == ""


def test_the_only_host_is_never_evicted():
    health = serving(count=2, host_failures=0, restarts=5)
    for when in (10.0, 11.0, 12.0):
        assert health.lost("rollout-0", when, "killed") is Health.RESTARTING
    assert health.evicted_hosts == {}


def test_leaving_is_no_failure():
    health = serving(restarts=0)
    health.leaves("rollout-0", 10.0, "SIGTERM")
    assert not health.takes_work("rollout-0")
    assert health.lost("rollout-0", 11.0, "its process ended") is Health.LEFT
    assert health.members["rollout-0"].failures == []
    assert health.refusal("rollout-0", "a") == ""
    health.came("rollout-0", "b", 20.0)
    assert health.health("rollout-0") is Health.STARTING


def test_one_that_was_sent_away_returns_only_when_it_is_started_again():
    health = serving(may_return=False)
    health.left("rollout-0", 10.0, "removed")
    assert health.refusal("rollout-0", "a") == "rollout-0 has left this run: removed"
    health.starts("rollout-0", 11.0, "added")
    assert health.refusal("rollout-0", "a") == ""


def test_whoever_is_added_takes_the_place_of_one_that_has_left():
    health = serving(count=3)
    assert health.free_index() == 3
    health.left("rollout-1", 10.0, "removed")
    assert health.free_index() == 1
    health.lost("rollout-2", 11.0, "killed")
    health.starts("rollout-1", 12.0)
    assert health.free_index() == 3


def test_every_change_is_told():
    told = []
    health = serving(on_change=lambda member: told.append((member.name, member.health.value, member.since)))
    health.lost("rollout-1", 10.0, "killed")
    assert told[-3:] == [
        ("rollout-0", "healthy", 2.0),
        ("rollout-1", "healthy", 2.0),
        ("rollout-1", "restarting", 10.0),
    ]


@pytest.mark.parametrize("event", ["starts", "leaves"])
def test_nothing_brings_an_evicted_rollout_back(event):
    health = serving(restarts=0)
    health.lost("rollout-0", 10.0, "killed")
    if event == "leaves":
        health.leaves("rollout-0", 11.0, "drained")
        assert health.health("rollout-0") is Health.EVICTED
    else:
        with pytest.raises(RuntimeError, match="evicted -> starting is not allowed"):
            health.starts("rollout-0", 11.0)

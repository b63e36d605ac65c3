"""Rollouts that come, leave, hang and fail, under the real controller in virtual time."""

from dataclasses import replace

import pytest

from laminar.controller.recent_results import RecentResults
from laminar.controller.repl_commands import execute
from laminar.errors import RunFailed
from laminar.observability import events as event_types
from laminar.protocol.messages import Leaving
from laminar.simulation.cluster import RunOptions
from tests.simulation.small_cluster import Recorded, experiment
from tests.simulation.test_cluster import check_trained

HEARTBEATS = RunOptions(heartbeats=True, restart_s=0.5, notice_s=0.1)


def fleet(*, hosts=1, **overrides):
    rollout = {"suspect_after_s": 3.0, "silence_limit_s": 6.0, "drain_s": 8.0}
    settings = {"trainer__steps": 40, **{f"rollout__{key}": value for key, value in rollout.items()}, **overrides}
    return Recorded(experiment(**settings), options=replace(HEARTBEATS, hosts=hosts)), experiment(**settings)


def ask(line, answers=None):
    def asked(run):
        answer = execute(line, run.controller, RecentResults(run.events))
        if answers is not None:
            answers.append(answer)

    return asked


def health_of(run, name):
    return [event.health for event in run.of(event_types.RolloutHealthChanged) if event.rollout == name]


def test_rollouts_that_are_added_take_weights_and_then_work():
    run, config = fleet(rollout__replicas=2)
    given = []

    def note(made):
        made.events.subscribe(
            lambda event: given.append((event.trajectory.rollout, made.loop.time())), event_types.TrajectoryStarted
        )
        made.events.subscribe(lambda event: given.append((event.rollout, "pulled")), event_types.WeightsPulled)

    run.checks.append(note)
    run.at(5.0, ask("add 2")).to_the_end()
    check_trained(run, config)
    for name in ("rollout-2", "rollout-3"):
        assert health_of(run, name) == ["healthy"]
        mine = [what for rollout, what in given if rollout == name]
        assert mine[0] == "pulled" and len(mine) > 5


@pytest.mark.parametrize("command", ["drain", "remove"])
def test_a_rollout_that_is_sent_away_leaves_and_nothing_is_lost(command):
    run, config = fleet()
    run.at(2.3, ask(f"{command} 1")).to_the_end()
    check_trained(run, config)
    assert health_of(run, "rollout-1") == ["healthy", "draining", "left"]
    assert not run.of(event_types.RolloutLost)
    assert not run.run.workers["rollout-1"].alive
    orphaned = run.of(event_types.TrajectoryOrphaned)
    assert bool(orphaned) == (command == "remove")
    assert sum(event.lost_tokens for event in run.of(event_types.TrajectoryRestarted)) == 0
    recovered = run.of(event_types.TrajectoriesRecovered)
    assert sum(event.trajectories for event in recovered) == len(orphaned)


def test_the_place_of_one_that_left_is_taken_by_the_next_that_is_added():
    run, config = fleet()
    run.at(2.3, ask("remove 1")).at(8.0, ask("add")).to_the_end()
    check_trained(run, config)
    assert health_of(run, "rollout-1") == ["healthy", "draining", "left", "starting", "healthy"]


def notice(name, seconds=8.0):
    """SIGTERM, and the end of the instance when the time is over."""

    def strike(made):
        worker = made.workers[name]
        worker.send(Leaving(seconds=seconds))
        made.loop.call_later(seconds, worker.kill)

    return strike


@pytest.mark.parametrize("seconds", [0.4, 8.0])
def test_a_spot_notice_moves_what_is_left_and_is_no_failure(seconds):
    run, config = fleet(rollout__restarts=0)
    run.at(2.3, notice("rollout-1", seconds)).to_the_end()
    check_trained(run, config)
    assert health_of(run, "rollout-1") == ["healthy", "draining", "left"]
    assert not run.of(event_types.RolloutLost)
    assert not [event for event in run.of(event_types.WorkerReplaced) if event.worker == "rollout-1"]


def test_one_that_is_gone_before_it_could_hand_over_costs_no_restart():
    run, config = fleet()
    run.at(2.3, notice("rollout-1", 0.001)).to_the_end()
    check_trained(run, config)
    assert health_of(run, "rollout-1")[-1] == "left"
    assert not run.of(event_types.WorkerReplaced)


def test_a_late_heartbeat_makes_a_suspect_that_gets_nothing_until_it_is_heard():
    run, config = fleet()
    given = []

    def note(made):
        kinds = (event_types.TrajectoryStarted, event_types.TrajectoryMoved)
        made.events.subscribe(lambda event: given.append((event.trajectory.rollout, made.loop.time())), *kinds)

    run.checks.append(note)
    run.at(4.2, lambda made: made.workers["rollout-2"].hang()).at(9.0, lambda made: made.workers["rollout-2"].resume())
    run.to_the_end()
    check_trained(run, config)
    assert health_of(run, "rollout-2") == ["healthy", "suspect", "healthy"]
    assert not run.of(event_types.RolloutLost)
    suspect_from, until = 4.2 + 3.0 + 1.0, 9.0
    assert not [when for name, when in given if name == "rollout-2" and suspect_from < when < until]
    assert [when for name, when in given if name == "rollout-2" and when > until]


def test_one_that_hangs_too_long_is_lost_and_fenced_when_it_returns():
    """Its process is killed for its successor here; one on another host would be told to end, as a stranger."""
    run, config = fleet(rollout__restarts=0)
    run.at(4.2, lambda made: made.workers["rollout-2"].hang()).at(30.0, lambda made: made.workers["rollout-2"].resume())
    run.to_the_end()
    check_trained(run, config)
    assert health_of(run, "rollout-2") == ["healthy", "suspect", "evicted"]
    assert "silent for 6 s" in run.of(event_types.RolloutLost)[0].reason
    assert not run.run.workers["rollout-2"].alive  # it was told to end


def test_trajectories_of_a_killed_rollout_go_on_at_once_where_its_version_is_served():
    run, config = fleet()
    run.at(2.3, lambda made: made.workers["rollout-1"].kill()).to_the_end()
    check_trained(run, config)
    recovered = run.of(event_types.TrajectoriesRecovered)
    assert [event.rollout for event in recovered] == ["rollout-1"]
    assert recovered[0].trajectories > 0 and recovered[0].seconds < 2


def test_a_rollout_that_fails_too_often_is_left_out():
    run, config = fleet(rollout__restarts=1)
    for when in (2.3, 12.0):
        run.at(when, lambda made: made.workers["rollout-1"].kill())
    run.to_the_end()
    check_trained(run, config)
    assert health_of(run, "rollout-1") == ["healthy", "restarting", "starting", "healthy", "evicted"]


def test_a_host_whose_rollouts_fail_too_often_is_evicted_with_those_that_have_not_failed():
    run, config = fleet(hosts=2, rollout__replicas=6, rollout__restarts=9, rollout__host_failures=2)
    for when, name in ((2.3, "rollout-1"), (2.4, "rollout-3"), (6.0, "rollout-1")):
        run.at(when, lambda made, name=name: made.workers[name].kill())
    run.to_the_end()
    check_trained(run, config)
    controller = run.run.controller
    assert controller.fleet.health.evicted_hosts == {
        "host-1": "3 losses of rollouts within an hour (rollout.host_failures)"
    }
    assert health_of(run, "rollout-1")[-1] == "evicted"
    assert health_of(run, "rollout-5") == ["healthy", "draining", "left"]  # with what it had, though it never failed
    assert sorted(controller.rollouts.replicas) == ["rollout-0", "rollout-2", "rollout-4"]


def test_the_run_waits_for_another_rollout_when_the_last_had_to_leave_and_ends_if_none_comes():
    run, _ = fleet(rollout__replicas=1)
    run.at(2.3, notice("rollout-0"))
    with pytest.raises(RunFailed, match=r"no rollout is left: .*SIGTERM.*start_timeout_s"):
        run.to_the_end()


def test_a_rollout_that_is_added_in_time_saves_the_run():
    run, config = fleet(rollout__replicas=1)
    run.at(2.3, notice("rollout-0")).at(30.0, ask("add")).to_the_end()
    check_trained(run, config)

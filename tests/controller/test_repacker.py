"""Polls, plans and moves of the whole controller in virtual time: the rollouts are modelled, nothing else."""

import asyncio
import itertools

import pytest

from laminar.controller.recent_results import RecentResults
from laminar.controller.repack_planner import Move
from laminar.controller.repl_commands import execute
from laminar.observability import events as event_types
from laminar.protocol import messages
from laminar.simulation.cluster import RunOptions
from laminar.simulation.models.workload import ToolCalls
from laminar.trajectory import TrajectoryState
from tests.simulation.small_cluster import Recorded, experiment, workload
from tests.simulation.test_cluster import _long_tailed, check_trained


def long_tailed(options=None, **overrides):
    settings = {"trainer__steps": 8, "rollout__max_response_tokens": 2000, "repack__interval_s": 0.05}
    config = experiment(**(settings | overrides))
    return config, Recorded(config, workload=_long_tailed(config), options=options)


def test_moves_are_reported_with_what_they_cost_and_gained():
    config, run = long_tailed(repack__enabled=True)
    run.to_the_end()
    check_trained(run, config)
    moved, settled = run.of(event_types.RolloutsRepacked), run.of(event_types.RepackSettled)
    assert moved and settled and len(settled) <= len(moved)
    assert all(one.freed_s > 0 and one.pause_s_max >= one.pause_s_mean >= 0 and one.tokens > 0 for one in settled)
    assert any(one.gained_tokens > 0 for one in settled)
    assert any(one.planned_frees_s and one.planned_costs_s for one in settled)  # both were measured
    lines = [event.line for event in run.of(event_types.MetricsReported)]
    assert sum(line["repack_moves"] for line in lines) == len(moved)
    assert sum(line["repack_trajectories"] for line in lines) == sum(one.trajectories for one in moved)


def test_nothing_is_moved_unless_it_is_enabled_or_asked_for():
    answers = {}

    def ask(made):
        answers["plan"] = execute("repack plan", made.controller, RecentResults(made.events))
        answers["now"] = execute("repack", made.controller, RecentResults(made.events))

    config, run = long_tailed()
    asks = [1.5 + 0.25 * k for k in range(12)]
    for seconds in asks:
        run.at(seconds, ask)
    run.to_the_end()
    check_trained(run, config)
    assert answers["now"].data == {"asked": 4}
    names = {f"rollout-{k}" for k in range(4)}
    plan = answers["plan"].data
    assert {move["source"] for move in plan["moves"]} | plan["reasons"].keys() == names
    assert run.of(event_types.RolloutsRepacked)
    _, quiet = long_tailed()
    assert not quiet.to_the_end().of(event_types.RolloutsRepacked)


def test_a_plan_uses_every_observation_once_and_a_publish_has_a_plan_made_at_once():
    plans = []

    def watch(made):
        plan = made.controller.repacker.plan

        def planned(**options):
            result = plan(**options)
            plans.append((made.loop.time(), dict(result.reasons)))
            return result

        made.controller.repacker.plan = planned

    _, run = long_tailed(repack__enabled=True, repack__interval_s=0.7)
    published = []
    run.at(0.0, watch)
    run.checks.append(
        lambda made: made.events.subscribe(lambda _: published.append(made.loop.time()), event_types.WeightsPublished)
    )
    run.to_the_end()
    times = [when for when, _ in plans]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 1.4 + 1e-6
    for moment in published[1:-1]:  # before the first and after the last there are no rollouts
        assert any(moment <= when <= moment + 0.01 for when in times)
    assert not any("since the last plan" in reason for _, reasons in plans for reason in reasons.values())


def test_a_rollout_that_does_not_answer_a_poll_is_left_out_of_the_plan():
    reasons = []

    def mute(made):
        worker = made.workers["rollout-1"]
        handle = worker.handle
        worker.handle = lambda message: None if isinstance(message, messages.ReportLoad) else handle(message)
        plan = made.controller.repacker.plan

        def planned(**options):
            result = plan(**options)
            reasons.append(result.reasons.get("rollout-1", ""))
            return result

        made.controller.repacker.plan = planned

    config, run = long_tailed(repack__enabled=True)
    run.at(2.0, mute).to_the_end()
    check_trained(run, config)
    assert any("since the last plan" in reason or "often enough since" in reason for reason in reasons)


def busy(made, name):
    return made.controller.rollouts.replicas[name]


def move_when_possible(seen, fits):
    """Look until two rollouts of one version have trajectories that `fits`; then move by force, and keep what came of it."""

    async def force(made):
        while True:
            await asyncio.sleep(0.02)
            replicas = list(made.controller.rollouts.replicas.values())
            pairs = [
                (source, target)
                for source in replicas
                for target in replicas
                if source is not target
                and source.in_flight
                and target.in_flight
                and source.stopping_for is None is target.stopping_for
                and fits(made, source, target)
            ]
            if pairs:
                source, target = pairs[0]
                before = dict(source.in_flight)
                await made.controller.repacker._move(Move(source=source.name, target=target.name))
                seen.append((source, target, before))
                return

    return lambda made: seen.append(made.loop.create_task(force(made)))


@pytest.mark.parametrize("reason", ["full", "other version"])
def test_what_a_target_cannot_take_stays_where_it_is(reason):
    def fits(made, source, target):
        if reason == "full":
            together = len(source.in_flight) + len(target.in_flight)
            return source.policy_version == target.policy_version and together > 8
        return source.policy_version != target.policy_version

    seen = []
    config, run = long_tailed()
    run.at(1.2, move_when_possible(seen, fits)).to_the_end()
    check_trained(run, config)
    assert len(seen) == 2
    assert not run.of(event_types.RolloutsRepacked) and not run.of(event_types.TrajectoryMoved)


def test_what_has_no_room_when_it_arrives_goes_on_elsewhere():
    """The target fills up while the source stops."""
    seen, states = [], []

    def fill(made):
        manager = made.controller.rollouts
        release = manager.release_what_has_no_room

        def full(replica):
            most, manager._max_running = manager._max_running, len(replica.in_flight)
            release(replica)
            manager._max_running = most
            states.extend(trajectory.state for trajectory in made.controller.pool.orphans.values())

        manager.release_what_has_no_room = full

    config, run = long_tailed()

    def fits(made, source, target):
        together = len(source.in_flight) + len(target.in_flight)
        return source.policy_version == target.policy_version and together <= 8

    run.at(0.0, fill).at(1.2, move_when_possible(seen, fits)).to_the_end()
    check_trained(run, config)
    assert states and set(states) == {TrajectoryState.ORPHANED}
    assert run.of(event_types.TrajectoryOrphaned) and run.of(event_types.TrajectoryMoved)


def test_trajectories_that_wait_for_an_environment_move_along():
    config = experiment(
        environment__name="python_tool",
        repack__enabled=True,
        repack__interval_s=0.05,
        schedule__max_staleness=8,
        trainer__steps=10,
        reward__workers=16,
    )
    tools = ToolCalls(minimum=0, maximum=2, latency_median_s=1.0, latency_p99_s=20.0, latency_limit_s=25.0)
    run = Recorded(config, workload=workload(config, tools=tools))
    homes = []

    def watch(made):
        stop, pool = made.controller.driver.stop, made.controller.pool

        async def and_look(replica, go_on_at, **options):
            waiting = pool.in_environment(replica.name)
            await stop(replica, go_on_at, **options)
            homes.extend(each.rollout == go_on_at for each in waiting if each.state is TrajectoryState.ENVIRONMENT)

        made.controller.driver.stop = and_look

    run.at(0.0, watch).to_the_end()
    assert homes and all(homes)
    steps = run.of(event_types.StepFinished)
    trained = [each for step in steps for group in step.groups for each in group.trajectories]
    assert len({each.trajectory_id for each in trained}) == len(trained) == 10 * 4 * 2
    assert all(len(each.versions) == 1 for each in trained)


@pytest.mark.parametrize("victim", ["source", "target"])
def test_a_death_half_way_costs_no_token(victim):
    config, run = long_tailed(
        repack__enabled=True, options=RunOptions(heartbeats=True, restart_s=0.5, latency_s=0.01), rollout__restarts=8
    )
    killed = []

    def kill(made):
        stop = made.controller.driver.stop

        async def and_kill(replica, go_on_at, **options):
            await stop(replica, go_on_at, **options)
            if len(killed) < 3 and go_on_at != replica.name:
                name = replica.name if victim == "source" else go_on_at
                killed.append(name)
                made.workers[name].kill()

        made.controller.driver.stop = and_kill

    run.at(0.0, kill).to_the_end()
    check_trained(run, config)
    assert killed

import hashlib
import os
import subprocess
import sys

import pytest

from laminar.errors import RunFailed, UserError, WorkerLost
from laminar.observability import events as event_types
from laminar.simulation.cluster import RunOptions
from laminar.simulation.models.lengths import LogNormalLengths
from laminar.simulation.models.workload import ToolCalls, Workload
from tests.simulation.small_cluster import Recorded, experiment, workload

SCHEDULES = ("laminar", "synchronous", "one_step", "stream", "partial")


def check_trained(run, config):
    """Each step trained whole groups, each trajectory once, with exactly the workload's tokens, all of one version."""
    seen = []
    for step in run.of(event_types.StepFinished):
        assert len(step.groups) == config.trainer.groups_per_step
        for group in step.groups:
            seen.append(group.group_id)
            for member, trajectory in enumerate(group.trajectories):
                expected = run.run.models.workload.response_tokens(group.prompt.prompt_id, member)
                tokens = trajectory.response_token_ids()
                assert trajectory.num_tokens == len(tokens) == len(trajectory.response_logprobs()) == expected
                made_by = []
                for version, start in trajectory.versions:
                    made_by = made_by[:start] + [version] * (expected - start)
                assert tokens.tolist() == made_by
                if config.schedule.name != "partial":
                    assert set(made_by) == {trajectory.policy_version}
                cut = run.run.models.workload.was_cut(group.prompt.prompt_id, member)
                assert trajectory.finish_reason == ("length" if cut else "stop")
    assert len(seen) == len(set(seen)) == config.trainer.steps * config.trainer.groups_per_step


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("repack", [False, True])
def test_every_schedule_makes_its_steps_with_exact_tokens(name, repack):
    config = experiment(schedule__name=name, repack__enabled=repack, trainer__mini_batches=2)
    run = Recorded(config).to_the_end()
    assert [step.step for step in run.of(event_types.StepFinished)] == [1, 2, 3, 4]
    check_trained(run, config)
    assert run.record.step_s > 0 and run.record.kv_utilization > 0
    generated = sum(event.tokens for event in run.of(event_types.TokensAppended))
    assert generated >= sum(
        t.num_tokens for s in run.of(event_types.StepFinished) for g in s.groups for t in g.trajectories
    )
    if name == "synchronous":
        assert run.record.staleness == {0: 32}


def test_repack_moves_trajectories_without_losing_a_token():
    config = experiment(
        repack__enabled=True, repack__interval_s=0.05, trainer__steps=8, rollout__max_response_tokens=2000
    )
    run = Recorded(config, workload=_long_tailed(config)).to_the_end()
    assert run.of(event_types.RolloutsRepacked)
    check_trained(run, config)
    moves = run.of(event_types.KvMoved)
    assert moves and not any(move.error for move in moves)
    replicas = run.run.controller.rollouts.replicas.values()
    assert set(run.run.shelf) <= {name for replica in replicas for name in replica.kv_to_drop}, "KV is left behind"


def test_repack_without_moving_kv_prefills():
    config = experiment(
        repack__enabled=True,
        repack__move_kv="never",
        repack__interval_s=0.05,
        trainer__steps=8,
        rollout__max_response_tokens=2000,
    )
    run = Recorded(config, workload=_long_tailed(config)).to_the_end()
    assert run.of(event_types.RolloutsRepacked) and not run.of(event_types.KvMoved)


def test_partial_mixes_versions_in_order():
    config = experiment(schedule__name="partial", trainer__steps=6, rollout__max_response_tokens=2000)
    run = Recorded(config, workload=_long_tailed(config)).to_the_end()
    check_trained(run, config)
    assert run.record.mixed_version_fraction > 0


def test_tool_calls_pause_trajectories_and_cost_no_tokens():
    config = experiment()
    tools = ToolCalls(minimum=1, maximum=3, latency_median_s=2.0, latency_p99_s=4.0, latency_limit_s=10.0)
    slow, fast = Recorded(config, workload=workload(config, tools=tools)).to_the_end(), Recorded(config).to_the_end()
    check_trained(slow, config)
    assert slow.record.step_s > fast.record.step_s


def test_colocated_gpus_take_turns():
    config = experiment(schedule__name="synchronous")
    apart = Recorded(config).to_the_end().record
    together = Recorded(config, gpus=4).to_the_end().record
    assert together.step_s > apart.step_s  # the switch
    total = sum(together.gpu_seconds.values())
    assert total == pytest.approx(4 * together.measured_s, rel=0.05)


def test_a_model_that_does_not_fit_is_refused_before_anything_runs():
    config = experiment()
    with pytest.raises(UserError, match="kv_capacity_tokens: 100"):
        Recorded(config, kv_capacity_tokens=100)


def test_the_end_of_the_data_ends_the_run():
    run = Recorded(experiment(trainer__steps=100), options=RunOptions(prompts=10)).to_the_end()
    assert [len(step.groups) for step in run.of(event_types.StepFinished)] == [4, 4, 2]


PROGRAM = """
from tests.simulation.test_cluster import event_log
print(event_log())
"""


def event_log():
    """Digest of the events of a run with everything in it that could be in another order."""
    config = experiment(repack__enabled=True, trainer__checkpoint_every=2, trainer__ranks=2)
    run = Recorded(config, options=RunOptions(heartbeats=True, restart_s=0.5), seed=3)
    lines = []
    run.checks.append(
        lambda made: made.events.subscribe(lambda event: lines.append(f"{made.loop.time()!r} {_line(event)}"))
    )
    run.at(2.5, lambda made: made.workers["rollout-1"].kill())
    run.at(2.6, lambda made: made.workers["relay-1"].kill())
    run.to_the_end()
    assert len(lines) > 200
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _line(event):
    if isinstance(event, event_types.MetricsReported):
        return repr(event.line)
    subject = getattr(event, "trajectory", None)
    if subject is not None:
        return f"{type(event).__name__} {subject.trajectory_id} {subject.rollout} {subject.num_tokens} {subject.state}"
    group = getattr(event, "group", None)
    return f"{type(event).__name__} {group.group_id if group else event if not hasattr(event, 'groups') else ''}"


def test_the_same_seed_gives_the_same_events_in_every_process():
    digests = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        digests.append(result.stdout)
    assert digests[0] == digests[1] == event_log() + "\n"


@pytest.mark.parametrize("moment", [1.9, 2.1, 2.5, 3.0])
def test_a_killed_rollout_costs_no_token_that_was_taken_in(moment):
    config = experiment(rollout__delta_interval_s=0.1, trainer__steps=6)
    run = Recorded(config, options=RunOptions(restart_s=0.5)).at(moment, lambda made: made.workers["rollout-0"].kill())
    run.to_the_end()
    assert run.of(event_types.RolloutLost)
    check_trained(run, config)
    assert sum(event.lost_tokens for event in run.of(event_types.TrajectoryRestarted)) == 0


def test_a_hung_rollout_is_given_up_by_silence_and_replaced():
    config = experiment(trainer__steps=30)
    run = Recorded(config, options=RunOptions(heartbeats=True)).at(2.2, lambda made: made.workers["rollout-2"].hang())
    run.to_the_end()
    lost = run.of(event_types.RolloutLost)
    assert [event.rollout for event in lost] == ["rollout-2"] and "silent" in lost[0].reason
    check_trained(run, config)


def test_a_hang_that_ends_in_time_is_not_noticed():
    config = experiment(trainer__steps=30)
    run = Recorded(config, options=RunOptions(heartbeats=True))
    run.at(2.2, lambda made: made.workers["rollout-2"].hang()).at(5.0, lambda made: made.workers["rollout-2"].resume())
    run.to_the_end()
    assert not run.of(event_types.RolloutLost)
    check_trained(run, config)


def test_a_killed_trainer_goes_on_from_its_checkpoint():
    config = experiment(trainer__checkpoint_every=2, trainer__steps=6, trainer__ranks=2)
    run = Recorded(config, options=RunOptions(restart_s=0.5))
    run.checks.append(lambda made: made.events.subscribe(_kill_trainer_at(made, 3), event_types.StepFinished))
    run.to_the_end()
    (restart,) = run.of(event_types.TrainerRestarted)
    assert (restart.step, restart.lost_steps) == (2, 1)
    steps = run.of(event_types.StepFinished)
    assert [step.step for step in steps] == [1, 2, 3, 3, 4, 5, 6]
    assert len({step.policy_version for step in steps}) == 7  # no version is published twice
    final = {step.step: step for step in steps}
    groups = [group.group_id for step in final.values() for group in step.groups]
    assert len(groups) == len(set(groups)) == 24


def _kill_trainer_at(made, step):
    def on_step(event):
        if event.step == step and made.workers["trainer-1"].life.number == 1:
            made.loop.call_later(0.001, made.workers["trainer-1"].kill)

    return on_step


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_relay_comes_back_and_gets_the_newest_version(rank):
    config = experiment(trainer__steps=10, relay__count=3)
    run = Recorded(config, options=RunOptions(restart_s=0.5)).at(2.4, lambda made: made.workers[f"relay-{rank}"].kill())
    run.to_the_end()
    check_trained(run, config)
    assert run.run.workers[f"relay-{rank}"].life.number == 2


def test_relays_that_were_started_by_hand_are_waited_for_when_all_are_lost():
    config = experiment(trainer__steps=10, relay__count=2, launch__relays="manual")
    run = Recorded(config, options=RunOptions(restart_s=0.5))
    run.at(2.4, lambda made: made.supervisor.lose_tier())
    run.at(4.0, lambda made: [made.supervisor.start(f"relay-{rank}") for rank in (0, 1)])
    run.to_the_end()
    check_trained(run, config)
    assert not [event for event in run.of(event_types.WorkerReplaced) if event.worker.startswith("relay")]


def test_a_single_relay_may_die_any_number_of_times_if_publishes_lie_between():
    config = experiment(trainer__steps=16, relay__count=1, relay__restarts=1)
    run = Recorded(config, options=RunOptions(restart_s=0.5))
    deaths = []

    def kill(made):
        def on_step(event):
            if event.step in (3, 8, 13):
                deaths.append(event.step)
                made.loop.call_soon(made.workers["relay-0"].kill)

        made.events.subscribe(on_step, event_types.StepFinished)

    run.at(0.0, kill).to_the_end()
    assert deaths == [3, 8, 13]
    assert run.run.workers["relay-0"].life.number == 4


def test_a_relay_that_dies_while_all_are_started_together_is_started_alone():
    config = experiment(trainer__steps=12, relay__count=2, relay__restarts=1)
    run = Recorded(config, options=RunOptions(restart_s=0.5))
    run.at(2.4, lambda made: made.supervisor.lose_tier())
    run.at(3.5, lambda made: made.workers["relay-1"].kill())  # its second process, which is not ready yet
    run.to_the_end()
    check_trained(run, config)
    assert [run.run.workers[f"relay-{rank}"].life.number for rank in (0, 1)] == [2, 3]
    assert [event.worker for event in run.of(event_types.WorkerReplaced)][-2:] == ["relays", "relay-1"]


def test_all_relays_can_end_again_while_they_are_started():
    config = experiment(trainer__steps=14, relay__count=2)
    run = Recorded(config, options=RunOptions(restart_s=0.5))
    run.at(2.4, lambda made: made.supervisor.lose_tier())
    run.at(3.5, lambda made: made.supervisor.lose_tier())
    run.to_the_end()
    check_trained(run, config)
    assert [run.run.workers[f"relay-{rank}"].life.number for rank in (0, 1)] == [3, 3]
    assert all(relay.stored_version == 14 for relay in run.run.controller.relays.relays.values())


def test_a_hung_relay_is_killed_and_comes_back():
    config = experiment(trainer__steps=30)
    run = Recorded(config, options=RunOptions(heartbeats=True)).at(2.4, lambda made: made.workers["relay-0"].hang())
    run.to_the_end()
    check_trained(run, config)
    assert run.run.workers["relay-0"].life.number == 2


def test_a_worker_that_ends_before_it_is_known_ends_the_run():
    run = Recorded(experiment()).at(0.5, lambda made: made.workers["rollout-1"].kill())
    run.run.options = RunOptions(latency_s=1.0)
    with pytest.raises(WorkerLost, match=r"rollout-1 did not start: its process ended \(signal SIGKILL\)"):
        run.to_the_end()


def test_what_ends_the_controller_ends_the_run():
    config = experiment(reward__on_invalid="fail")
    run = Recorded(config).at(1.0, _spoil_rewards)
    with pytest.raises(RunFailed, match=r"the reward of trajectory \S+ is nan"):
        run.to_the_end()


def test_groups_without_a_reward_are_dropped_and_replaced():
    config = experiment(reward__on_invalid="drop", trainer__steps=8)
    run = Recorded(config).at(1.0, _spoil_rewards)
    run.to_the_end()
    assert run.of(event_types.GroupDropped)
    check_trained(run, config)


def _spoil_rewards(made):
    for index in range(2):
        made.workers[f"environment-{index}"].fault = {"1.0": "nan", "3.1": "error"}.get


def _long_tailed(config):
    return Workload(
        lengths=LogNormalLengths(median=60, p99=1900, maximum=config.rollout.max_response_tokens),
        prompt_lengths=32,
        group_size=config.trainer.group_size,
        groups_per_step=config.trainer.groups_per_step,
        seed=1,
    )


def test_a_rollout_whose_trajectories_are_all_at_the_environment_hands_them_over_for_newer_weights():
    config = experiment(
        environment__name="python_tool",
        repack__enabled=True,
        trainer__steps=10,
        trainer__groups_per_step=2,
        schedule__max_staleness=8,
        reward__workers=16,
    )
    tools = ToolCalls(minimum=0, maximum=2, latency_median_s=1.0, latency_p99_s=20.0, latency_limit_s=25.0)
    run = Recorded(config, workload=workload(config, tools=tools)).to_the_end()
    handed_over = [event for event in run.of(event_types.RolloutsRepacked) if event.seconds == 0.0]
    assert handed_over
    for step in run.of(event_types.StepFinished):
        for trajectory in (t for group in step.groups for t in group.trajectories):
            assert len(trajectory.versions) == 1
    assert len(run.of(event_types.StepFinished)) == 10

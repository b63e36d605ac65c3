"""Faults strike when and whom they should, seen in the event log of whole runs."""

import re
from dataclasses import replace

import pytest

from laminar.simulation.faults import fault as faults
from laminar.simulation.faults.draw_schedule import draw_schedule
from laminar.simulation.faults.fault_schedule import WorkloadFigures
from laminar.simulation.faults.run_schedule import run_schedule


def run_with(*struck, **sections):
    """The log of a small run of `laminar` with two of everything, and how it ended."""
    base = draw_schedule(1)
    tree = base.config.model_dump()
    tree["schedule"] = {"name": "laminar"}
    tree["buffer"] = {}
    tree["repack"] = {}
    tree["evaluation"] = sections.pop("evaluation", None)
    tree["rollout"] |= {"replicas": 2, "max_running": 8, "restarts": 3, "on_lost_version": "regenerate"}
    tree["relay"] |= {"count": 2, "keep_versions": 2}
    tree["reward"] |= {"workers": 2, "on_invalid": "drop", "timeout_s": 3.0}
    tree["trainer"] |= {"ranks": 2, "steps": 4, "groups_per_step": 2, "group_size": 2, "mini_batches": 1}
    tree["trainer"] |= {"checkpoint_every": 1, "restarts": 3}
    for section, values in sections.items():
        tree[section] |= values
    workload = WorkloadFigures(
        seed=4,
        prompts=None,
        prompt_tokens=16,
        prompt_tokens_p99=48,
        response_tokens=60,
        response_tokens_p99=120,
        latency_s=0.001,
        latency_jitter_s=0.0,
    )
    config = type(base.config).model_validate(tree)
    run = run_schedule(replace(base, config=config, workload=workload, faults=struck), keep_log=True)
    assert not run.violated, run.report
    return run


def lines(run, pattern):
    """Times of the lines that match."""
    return [float(line.split()[0]) for line in run.log.splitlines() if re.search(pattern, line)]


def test_without_faults_nothing_is_lost():
    run = run_with()
    assert run.report == "all steps made" and not run.strikes
    assert not lines(run, r"event +\w*Lost|event +Notice level='warning'")


def test_a_kill_strikes_at_its_time_and_is_noticed():
    run = run_with(faults.Kill(at=3.5, worker="rollout-1"))
    assert lines(run, "fault .*hits rollout-1#1") == [3.5]
    assert 3.5 < lines(run, "event +RolloutLost rollout='rollout-1'")[0] < 4.0
    assert lines(run, "event +WorkerReady worker='rollout-1'")[1:]  # it is back
    assert run.report == "all steps made"


def test_the_trainer_is_struck_in_all_its_ranks():
    run = run_with(faults.Kill(at=5.0, worker=faults.TRAINER))
    assert lines(run, r"fault .*hits trainer-\d#1") == [5.0, 5.0]
    assert lines(run, "event +TrainerRestarted")


def test_a_worker_that_fails_says_so():
    run = run_with(faults.Fail(at=3.5, worker="rollout-0"))
    assert lines(run, "message +rollout-0#1 -> controller: WorkerFailed error='the engine has failed'")
    assert lines(run, "event +RolloutLost rollout='rollout-0' reason='the engine has failed'")


@pytest.mark.parametrize(
    ("kind", "seconds", "lost"), [("Hang", 4.0, 0), ("Hang", 40.0, 1), ("Partition", 4.0, 0), ("Partition", 40.0, 1)]
)
def test_an_outage_is_noticed_only_beyond_the_limit_of_silence(kind, seconds, lost):
    run = run_with(faults.FAULTS[kind](at=3.0, worker="rollout-0", seconds=seconds))
    assert run.happened["RolloutLost"] == lost


def test_a_slow_link_is_slow_for_a_while():
    run = run_with(faults.SlowLink(at=2.0, worker="environment-0", seconds=2.0, extra_s=0.4))
    asked = lines(run, "message +controller -> environment-0#1: Score")
    answered = lines(run, "message +environment-0#1 -> controller: TrajectoryScored")
    waits = [answer - question for question, answer in zip(asked, answered, strict=False)]
    assert max(waits) > 0.4 > min(waits)


def test_duplicates_arrive():
    run = run_with(faults.Duplicates(at=0.5, worker="trainer", seconds=60.0, probability=1.0))
    assert len(lines(run, "trainer-0#1 -> controller: StepTrained step=1 ")) == 2
    assert run.report == "all steps made"


@pytest.mark.parametrize("moment, event", [("publish", "WeightsPublished"), ("broadcast", r"message .*: Carry ")])
def test_a_fault_waits_for_its_moment(moment, event):
    run = run_with(faults.Kill(at=4.0, moment=moment, delay_s=0.01, worker="relay-0"))
    happened = next(time for time in lines(run, event) if time >= 4.0)
    assert lines(run, "fault .*hits relay-0#1") == [pytest.approx(happened + 0.01, abs=1e-6)]


def test_a_second_failure_strikes_during_the_repair_of_the_first():
    run = run_with(
        faults.Kill(at=4.0, worker="rollout-0"),
        faults.Kill(at=4.0, moment="loss", delay_s=0.5, worker="rollout-1"),
        faults.Kill(at=4.0, moment="restart", delay_s=0.5, worker="rollout-0"),
    )
    assert lines(run, "fault .*hits rollout-1#1") == [pytest.approx(4.501)]
    assert lines(run, "fault .*hits rollout-0#2")
    assert run.happened["RolloutLost"] >= 2


@pytest.mark.parametrize(
    "how, reason", [("raise", "the reward function failed"), ("nan", "is nan"), ("hang", "reward.timeout_s")]
)
def test_bad_rewards_drop_their_groups(how, reason):
    run = run_with(faults.BadReward(at=2.0, how=how, count=1))
    assert len(lines(run, f"fault .*reward of trajectory .*: {how}")) == 1
    assert lines(run, f"event +GroupDropped .*{reason}")


def test_a_checkpoint_fails_on_all_ranks():
    run = run_with(faults.FailedCheckpoint(at=0.0, count=1))
    assert len(lines(run, "CheckpointSaved step=1 .*error='No space left on device'")) == 2
    assert lines(run, "CheckpointSaved step=2 .*error=''")


def test_the_user_pauses_and_stops():
    run = run_with(faults.Pause(at=3.0, generation=True, training=True, seconds=20.0), faults.Stop(at=26.0))
    assert lines(run, "fault +ends: Pause") == [23.0]
    assert not [time for time in lines(run, "event +TrajectoryStarted") if 3.0 < time < 23.0]
    assert run.report in ("stopped", "all steps made")


def test_a_fault_that_finds_nobody_says_so():
    run = run_with(faults.Kill(at=3.0, worker="rollout-0"), faults.Kill(at=3.0, worker="rollout-0"))
    assert lines(run, "fault +hits nothing: Kill") == [3.0]
    assert run.strikes == {"Kill rollout": 1}


def test_all_relays_end_together_and_come_back_together_with_what_they_held():
    run = run_with(faults.RelayTierLost(at=4.0))
    assert len(lines(run, "fault +RelayTierLost .*hits relay-")) == run.strikes["RelayTierLost"] > 1
    assert len(lines(run, "event +WorkerReplaced worker='relays'")) == 1
    assert lines(run, r"relay-0#2 -> controller: RelayJoined versions=\[\d.* world='mpirun-2'")
    assert run.report == "all steps made"


def test_a_host_takes_its_store_along():
    run = run_with(faults.HostLost(at=4.0, relay=1))
    assert lines(run, "fault +HostLost .*hits relay-1#1") == [4.0]
    assert lines(run, "fault +HostLost .*hits rollout-1#1") == [4.0]
    assert lines(run, r"relay-1#2 -> controller: RelayJoined versions=\[\] ")
    assert run.report == "all steps made"


HELD_OUT = {"source": {"type": "jsonl", "path": "held-out.jsonl"}, "prompts": 6, "samples": 2, "temperature": 1.0}


def test_an_evaluation_goes_on_where_another_rollout_serves_its_version():
    run = run_with(faults.Kill(at=2.6, worker="rollout-0"), evaluation=HELD_OUT | {"share": 1.0})
    assert not run.violated
    assert lines(run, "event +TrajectoryOrphaned trajectory=e1-")
    assert lines(run, r"event +TrajectoryMoved trajectory=e1-.*rollout-1")
    assert (run.happened["EvaluationFinished"], run.happened["EvaluationStartedOver"]) == (1, 0)


def test_an_evaluation_starts_over_when_its_only_host_is_lost_with_its_version():
    """Its host stays with version 0, of which the relays keep nothing by then."""
    slow = HELD_OUT | {"prompts": 20, "share": 0.1}
    run = run_with(faults.Kill(at=9.0, worker="rollout-0"), evaluation=slow, relay={"keep_versions": 1})
    assert not run.violated
    assert lines(run, "event +EvaluationStartedOver evaluation=1 goes_on_as=2 policy_version=0")
    assert lines(run, "event +EvaluationFinished result=.*evaluation=2 ")

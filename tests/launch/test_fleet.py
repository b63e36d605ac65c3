"""Rollouts of a real run that come, leave and hang; a trainer whose interruption nobody can tell from the losses."""

import asyncio
import os
import re
import signal
import sys

from tests.launch.live_run import all_trained_once, nothing_left, pid_of


def health_of(run, name):
    events = [line for line in run.lines("events.jsonl") if line["event"] == "RolloutHealthChanged"]
    return [line["health"] for line in events if line["rollout"] == name]


async def test_rollouts_join_and_leave_a_live_run(start):
    run = await start(
        trainer__steps=2000, rollout__max_response_tokens=60, rollout__drain_s=4, schedule__max_staleness=2
    )
    lines = [await run.line(r"rollout-\d is ready") for _ in range(2)]
    pids = {re.search(r"rollout-\d", line)[0]: pid_of(line) for line in lines}
    await run.line(r"^ *2/")
    assert "starting rollout-2" in await run.attach("add")
    await run.line(r"rollout-2 is ready")
    os.kill(pids["rollout-0"], signal.SIGTERM)  # a spot instance's notice
    await run.line(r"going on without rollout-0: it must be gone in 4 s \(SIGTERM\)")
    assert "rollout-1" in await run.attach("remove 1")
    await run.line(r"going on without rollout-1: removed by a person")
    assert " left " in await run.attach("fleet")
    assert "starting rollout-0" in await run.attach("add")
    await run.line(r"rollout-0 is ready")
    run.process.send_signal(signal.SIGINT)
    assert await run.end() == 0, run.output
    nothing_left(run)
    assert health_of(run, "rollout-0")[:4] == ["healthy", "draining", "left", "starting"]
    assert health_of(run, "rollout-1") == ["healthy", "draining", "left"]
    assert "was lost" not in run.output
    all_trained_once(run)


async def test_a_rollout_that_stands_still_is_given_up_and_its_trajectories_go_on(start):
    run = await start(
        trainer__steps=2000,
        rollout__max_response_tokens=60,
        rollout__suspect_after_s=1,
        rollout__silence_limit_s=2.5,
        controller__heartbeat_s=0.2,
    )
    line = await run.line(r"rollout-0 is ready")
    await run.line(r"^ *2/")
    os.kill(pid_of(line), signal.SIGSTOP)
    await run.line(r"rollout-0 was lost: silent for \d+ s \(rollout.silence_limit_s\)")
    await run.line(r"rollout-0 is ready")
    run.process.send_signal(signal.SIGINT)
    assert await run.end() == 0, run.output
    nothing_left(run)  # not the one that stood still either
    assert health_of(run, "rollout-0")[:4] == ["healthy", "suspect", "restarting", "starting"]
    all_trained_once(run)


async def test_rollouts_started_by_hand_join_at_any_time_and_are_fenced_when_they_return(start, tmp_path):
    run = await start(
        trainer__steps=5000,
        rollout__replicas=1,
        rollout__suspect_after_s=1,
        rollout__silence_limit_s=6,
        controller__heartbeat_s=0.2,
        launch__rollouts="manual",
    )
    await run.line(r"relay-0 is ready")

    async def by_hand(index):
        command = (sys.executable, "-m", "laminar.workers.rollout.main", "--connect", str(run.run_dir))
        return await asyncio.create_subprocess_exec(*command, "--index", str(index))

    first = await by_hand(0)
    await run.line(r"^ *2/")
    second = await by_hand(5)
    await run.line(r"rollout-5 is ready")
    first.send_signal(signal.SIGSTOP)
    await run.line(r"rollout-0 was lost: silent")
    first.send_signal(signal.SIGCONT)
    assert await asyncio.wait_for(first.wait(), 60) == 0  # told to end, for nobody knows it any more
    again = await by_hand(0)
    await run.line(r"rollout-0 is ready")
    run.process.send_signal(signal.SIGINT)
    assert await run.end() == 0, run.output
    assert [await asyncio.wait_for(process.wait(), 60) for process in (second, again)] == [0, 0]
    all_trained_once(run)


DETERMINISTIC = {
    "schedule": {"name": "synchronous", "on_stale": "train"},
    "reward__function": "varied_reward:reward",
    "rollout__replicas": 1,
    "trainer__ranks": 2,
    "trainer__steps": 6,
    "trainer__mini_batches": 2,
    "trainer__checkpoint_every": 2,
    "trainer__optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 2},
}
FIGURES = ("loss", "grad_norm", "learning_rate", "reward_mean", "mismatch_kl")


def figures_of(run):
    """By step, of its last making."""
    return {line["step"]: {name: line.get(name) for name in FIGURES} for line in run.lines("metrics.jsonl")}


async def test_a_trainer_that_was_interrupted_makes_the_same_losses(start):
    """A rank is killed within step 4: steps 3 and 4 are lost, their trajectories trained again."""
    undisturbed = await start(name="undisturbed", **DETERMINISTIC)
    assert await undisturbed.end() == 0, undisturbed.output
    run = await start(**DETERMINISTIC)
    line = await run.line(r"trainer-1 is ready")
    await run.line(r"^ *3/")
    os.kill(pid_of(line), signal.SIGKILL)
    await run.line(r"starting the trainer anew")
    assert await run.end() == 0, run.output
    nothing_left(run)
    steps = [line["step"] for line in run.lines("metrics.jsonl")]
    assert set(steps) == {1, 2, 3, 4, 5, 6}
    assert figures_of(run) == figures_of(undisturbed)
    assert all(figures["loss"] and figures["grad_norm"] for figures in figures_of(run).values())
    versions = [line["policy_version"] for line in run.lines("metrics.jsonl")]
    assert versions == sorted(set(versions)) and versions[-1] > 6
    assert not re.search(r"rollout-\d was lost", run.output)
    trained = [line for line in run.lines("trajectories.jsonl") if line["step"] is not None]
    assert {line["id"] for line in trained} == {f"{group}.{member}" for group in range(24) for member in range(2)}


async def test_a_checkpoint_that_cannot_be_written_is_told_and_the_last_complete_one_stays(start):
    run = await start(trainer__steps=14, trainer__checkpoint_every=3, trainer__ranks=2)
    line = await run.line(r"trainer-1 is ready")
    checkpoints = run.run_dir / "checkpoints"
    for step in (6, 9):
        (checkpoints / f".step-{step:06d}.partial").write_text("in the way, like a full disk")
    await run.line(r"checkpoint of step 6 failed: .*File exists")
    await run.line(r"checkpoint of step 9 failed")
    assert (checkpoints / "step-000003" / "complete.json").exists()
    os.kill(pid_of(line), signal.SIGKILL)
    await run.line(r"starting the trainer anew")
    assert await run.end() == 0, run.output
    restarted = next(line for line in run.lines("events.jsonl") if line["event"] == "TrainerRestarted")
    assert restarted["step"] == 3 and restarted["lost_steps"] >= 6
    assert (checkpoints / "step-000014" / "complete.json").exists()

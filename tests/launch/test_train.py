"""`laminar train` on real parts: torchrun, mpirun, engines, environment workers; and how it ends."""

import asyncio
import os
import re
import signal
import sys

import pytest
import yaml

from tests.launch.folder_watch import CREATED, OPENED, FolderWatch
from tests.launch.live_run import SHARED_MEMORY, LiveRun, all_trained_once, nothing_left, pid_of, write_config

METRICS = {
    "step",
    "policy_version",
    "time_s",
    "reward_mean",
    "staleness_mean",
    "staleness_max",
    "mismatch_kl",
    "publish_stall_s",
    "generated_tokens_per_s",
    "trained_tokens_per_s",
    "kv_utilization_mean",
    "trainer_idle_fraction",
    "rollout_idle_fraction",
    "trainer_seconds",
    "rollout_seconds",
    "broadcast_s",
    "broadcast_bytes",
    "pull_s_mean",
}


async def test_a_run_with_two_trainer_ranks_leaves_results_and_nothing_else(start, model):
    run = await start(trainer__ranks=2, trainer__mini_batches=2, trainer__checkpoint_every=2)
    assert await run.end() == 0, run.output
    nothing_left(run)

    metrics = run.lines("metrics.jsonl")
    assert [line["step"] for line in metrics] == [line["policy_version"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line.keys() >= METRICS
        assert line["mismatch_kl"] < 1e-6  # the engine's and the trainer's logprobs are of the same model
        assert line["publish_stall_s"] > 0
    assert sum(line["pulls"] for line in metrics) >= 2

    trajectories = run.lines("trajectories.jsonl")
    assert len({line["id"] for line in trajectories}) == len(trajectories) == 3 * 4 * 2
    assert {line["step"] for line in trajectories} == {1, 2, 3}
    assert all(line["staleness"] == line["step"] - 1 - line["policy_version"] for line in trajectories)
    assert all(line["finish_reason"] in ("stop", "length") for line in trajectories)

    assert yaml.safe_load((run.run_dir / "config.yaml").read_text())["trainer"]["ranks"] == 2
    logs = {path.name for path in (run.run_dir / "logs").iterdir()}
    assert logs >= {f"{name}.log" for name in ("trainer-0", "trainer-1", "relay-0", "rollout-1", "environment-0")}

    from transformers import AutoModelForCausalLM, AutoTokenizer

    for step in (2, 3):
        checkpoint = run.run_dir / "checkpoints" / f"step-{step:06d}"
        assert (checkpoint / "complete.json").exists()
        AutoModelForCausalLM.from_pretrained(checkpoint / "huggingface")
        AutoTokenizer.from_pretrained(checkpoint / "huggingface")
    for text in ("relay-1", "trainer-1 is ready", "finished: 3 steps", "staleness", "huggingface"):
        assert text in run.output


async def test_vllm_rollouts_train_too(start):
    run = await start(rollout__engine="vllm", rollout__replicas=1, trainer__steps=2, rollout__kv_cache_mib=32)
    assert await run.end() == 0, run.output
    nothing_left(run)
    assert all(line["mismatch_kl"] < 1e-6 for line in run.lines("metrics.jsonl"))
    assert "vllm" in run.output


async def test_a_live_run_answers_its_repl_and_ctrl_c_ends_it_with_a_checkpoint(start):
    run = await start(trainer__steps=100000)
    await run.line(r"^ *2/")
    attach = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "laminar", "attach", str(run.run_dir)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    text, _ = await asyncio.wait_for(attach.communicate(b"rollouts\nrelays\ntrainer\nbuffer\ntrajectory 0.0\n"), 60)
    assert attach.returncode == 0
    for expected in ("rollout-1", "relay-1", "consumed"):
        assert expected in text.decode()
    run.process.send_signal(signal.SIGINT)
    assert await run.end() == 0, run.output
    last = run.lines("metrics.jsonl")[-1]["step"]
    assert f"ended after step {last} of 100000: as asked" in run.output
    assert (run.run_dir / "checkpoints" / f"step-{last:06d}" / "complete.json").exists()
    nothing_left(run)


async def test_a_second_ctrl_c_ends_it_at_once(start):
    run = await start(trainer__steps=100000)
    await run.line(r"process \d+")
    run.process.send_signal(signal.SIGINT)
    await run.line("Ctrl-C again")
    run.process.send_signal(signal.SIGINT)
    assert await run.end() in (0, 130), run.output
    nothing_left(run)


async def test_when_the_supervisor_is_killed_all_ends_and_the_next_start_cleans_up(start, tmp_path, model):
    run = await start(trainer__steps=100000)
    await run.line(r"^ *1/")
    assert len(run.processes()) >= 6
    run.process.kill()
    await run.all_end(10)
    assert run.shared_memory() != []

    config, _ = write_config(tmp_path, model, trainer__steps=1)
    again = await LiveRun(config, tmp_path / "again", run.name).start()
    await again.line("removed .* from shared memory")
    assert await again.end() == 0, again.output
    nothing_left(again)


async def test_when_the_supervisor_is_killed_engines_that_are_still_starting_end_too(start):
    run = await start(rollout__engine="vllm")
    await run.line("rollout-0: starting the vllm engine")
    await run.line("trainer-0 is ready")  # about now the engines start processes of their own
    run.process.kill()
    await run.all_end(10)


async def test_a_rollout_that_dies_is_started_anew_and_no_group_is_lost(start):
    run = await start(trainer__steps=400, rollout__max_response_tokens=60)
    line = await run.line(r"rollout-0 is ready")
    await run.line(r"^ *2/")
    os.kill(pid_of(line), signal.SIGKILL)
    await run.line(r"rollout-0 was lost: its process ended \(signal SIGKILL\)")
    await run.line(r"rollout-0 is ready")
    run.process.send_signal(signal.SIGINT)
    assert await run.end() == 0, run.output
    nothing_left(run)
    assert all(line["staleness"] <= 4 for line in all_trained_once(run))


@pytest.mark.parametrize("killed", [("relay-0",), ("relay-1", "mpirun")], ids="-".join)
async def test_relays_that_die_come_back_and_no_rollout_notices(start, killed):
    run = await start(
        trainer__steps=10_000,  # the run goes on for as long as the relays take to come back, and is then told to end
        relay__count=2,
        rollout__replicas=2,
        rollout__max_response_tokens=30,
        relay__encoding="delta",
    )
    lines = [await run.line(r"started mpirun"), *[await run.line(r"relay-\d is ready") for _ in range(2)]]
    pids = {re.search(r"mpirun|relay-\d", line)[0]: pid_of(line) for line in lines}
    await run.line(r"^ *2/")
    for who in killed:
        os.kill(pids[who], signal.SIGKILL)
        await run.line(f"{'relay-0' if who == 'mpirun' else who} is ready")
    run.process.send_signal(signal.SIGINT)
    assert await run.end() == 0, run.output
    nothing_left(run)
    steps = [line["step"] for line in run.lines("metrics.jsonl")]
    assert steps == [*range(1, len(steps) + 1)]
    assert not re.search(r"(rollout|trainer)-\d was lost", run.output)


async def test_relays_without_mpi(start):
    run = await start(trainer__steps=4, relay__count=2, relay__transport="tcp")
    assert await run.end() == 0, run.output
    assert "mpirun" not in run.output
    nothing_left(run)


async def test_a_trainer_that_dies_goes_on_from_its_newest_checkpoint(start):
    run = await start(trainer__steps=60, trainer__ranks=2, trainer__checkpoint_every=3, rollout__max_response_tokens=40)
    line = await run.line(r"trainer-1 is ready")
    await run.line(r"^ *5/")
    os.kill(pid_of(line), signal.SIGKILL)
    await run.line(r"starting the trainer anew: trainer-\d was lost")
    assert await run.end() == 0, run.output
    nothing_left(run)
    steps = [line["step"] for line in run.lines("metrics.jsonl")]
    versions = [line["policy_version"] for line in run.lines("metrics.jsonl")]
    again = next(k for k in range(1, len(steps)) if steps[k] <= steps[k - 1])  # first step after the restart
    assert steps[again] % 3 == 1 and steps == [*range(1, steps[again - 1] + 1), *range(steps[again], 61)]
    assert versions == sorted(set(versions))  # never reused
    lost = set(range(steps[again], steps[again - 1] + 1))
    trained = [line for line in run.lines("trajectories.jsonl") if line["step"] is not None]
    assert len(trained) - len({line["id"] for line in trained}) <= len(lost) * 4 * 2


@pytest.mark.parametrize("name", ["synchronous", "one_step", "stream", "partial"])
async def test_every_schedule_runs_on_real_parts(start, name):
    run = await start(
        schedule__name=name,
        trainer__steps=4,
        trainer__mini_batches=2,
        rollout__max_response_tokens=60,
        rollout__delta_interval_s=0.05,
    )
    assert await run.end() == 0, run.output
    nothing_left(run)
    bound = {"synchronous": 0, "one_step": 1, "stream": 1, "partial": 4}[name]
    trained = run.lines("trajectories.jsonl")
    assert len({line["id"] for line in trained}) == len(trained) == 4 * 4 * 2
    assert max(line["staleness"] for line in trained) <= bound
    mixed = [line for line in trained if len(line["versions"]) > 1]
    assert name == "partial" or not mixed
    assert [line["step"] for line in run.lines("metrics.jsonl")] == [1, 2, 3, 4]
    assert all(line["mismatch_kl"] < 1e-6 for line in run.lines("metrics.jsonl") if line["staleness_max"] == 0)


async def test_a_worker_that_dies_ends_the_run_with_the_end_of_its_log(start):
    run = await start(trainer__steps=100000)
    line = await run.line(r"trainer-0 is ready")
    await run.line(r"^ *1/")
    os.kill(pid_of(line), signal.SIGKILL)
    assert await run.end() == 1, run.output
    assert "the run failed: trainer-0 was lost: its connection closed" in run.output
    assert "trainer-0.log" in run.output
    nothing_left(run)


async def test_an_existing_run_directory_is_refused_and_kept(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("kept")
    run = await start()
    assert await run.end() == 2
    assert "--overwrite" in run.output
    assert (tmp_path / "run" / "precious").read_text() == "kept"


async def test_a_taken_port_is_refused_before_anything_starts(start):
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    run = await start(controller__port=port)
    assert await run.end() == 2
    assert f"controller.port: cannot listen on 127.0.0.1:{port}" in run.output
    assert "started" not in run.output
    nothing_left(run)
    server.close()


async def test_stragglers_of_real_engines_are_moved_and_go_on(start):
    """No end of sequence comes from this model, so all responses are long; rollouts drain at every new version."""
    run = await start(
        trainer__steps=40,
        rollout__replicas=3,
        rollout__max_response_tokens=120,
        rollout__delta_interval_s=0.02,
        repack={"enabled": True, "interval_s": 0.02, "batch_bound": 16, "kv_ceiling": 1.0, "move_kv": "always"},
    )
    assert await run.end() == 0, run.output
    nothing_left(run)
    moves = [line for line in run.lines("events.jsonl") if line["event"] == "RolloutsRepacked"]
    assert moves and sum(line["trajectories"] for line in moves) > 0
    kv = [line for line in run.lines("events.jsonl") if line["event"] == "KvMoved"]
    assert any(line["tokens"] > 0 and line["nbytes"] > 0 for line in kv)
    assert not [line["error"] for line in kv if line["error"] not in ("", "stopped before it was imported")]
    assert len(run.lines("metrics.jsonl")) == 40
    assert all(line["staleness"] <= 4 for line in all_trained_once(run))


@pytest.mark.parametrize(
    ("engine", "replicas", "restarts"),
    [("torch", 2, 5), ("vllm", 3, 0)],  # vLLM takes long to start anew: the others go on
)
async def test_a_source_and_a_target_that_die_in_the_middle_of_a_move_lose_and_repeat_nothing(
    start, engine, replicas, restarts
):
    """Killed while the source writes the KV, and while the target reads it; before, stragglers are moved and go on."""
    run = await start(
        trainer__steps=100000,
        rollout__engine=engine,
        rollout__replicas=replicas,
        rollout__restarts=restarts,
        rollout__max_response_tokens=400,
        rollout__kv_cache_mib=64,
        rollout__delta_interval_s=0.02,
        repack={"enabled": True, "interval_s": 0.02, "batch_bound": 16, "kv_ceiling": 1.0, "move_kv": "always"},
    )
    await run.line(r"^ *1/")
    (folder,) = (SHARED_MEMORY / name / "kv" for name in run.shared_memory())
    watch = FolderWatch(folder, CREATED)
    for _ in range(8):  # trajectories; by then some of them go on
        await watch.name()
    watch.close()
    alive = {f"rollout-{index}" for index in range(replicas)}
    for moment, who in ((CREATED, "source"), (OPENED, "target")):
        watch = FolderWatch(folder, moment)
        name = await watch.name()
        while who == "target" and (
            name.startswith(".") or source_of(name) not in alive
        ):  # a source's, under way; or a dead one's
            name = await watch.name()
        watch.close()
        struck = source_of(name) if who == "source" else (alive - {source_of(name)}).pop()
        os.kill(run.process_of(struck), signal.SIGKILL)
        await run.line(rf"{struck} was lost")
        if restarts:
            await run.line(rf"{struck} is ready")
        else:
            alive.remove(struck)
    await run.line(r"^ *\d+/")
    run.process.send_signal(signal.SIGINT)
    assert await run.end() == 0, run.output
    nothing_left(run)
    assert all(line["staleness"] <= 4 for line in all_trained_once(run))
    events = run.lines("events.jsonl")
    killed = next(number for number, line in enumerate(events) if line["event"] == "RolloutLost")
    kv = [line for line in events[:killed] if line["event"] == "KvMoved"]
    assert any(line["tokens"] > 0 and line["nbytes"] > 0 for line in kv)
    assert not [line["error"] for line in kv if line["error"] not in ("", "stopped before it was imported")]
    at_zero = [line["mismatch_kl"] for line in run.lines("metrics.jsonl") if line["staleness_max"] == 0]
    assert all(mismatch < 1e-6 for mismatch in at_zero)


def source_of(name):
    """The rollout that a file of KV is from."""
    return name.lstrip(".").partition("~")[0]

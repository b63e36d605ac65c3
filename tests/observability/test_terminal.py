from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from laminar.observability.events import (
    CheckpointFinished,
    EventBus,
    GroupCompleted,
    GroupDropped,
    MetricsReported,
    Notice,
    ProcessStarted,
    PromptRejected,
    StepFinished,
    StepStarted,
    TokensAppended,
    WeightsBroadcast,
    WeightsPublished,
    WeightsPulled,
    WorkerJoined,
    WorkerProgress,
    WorkerReady,
)
from laminar.observability.terminal import Terminal
from tests.run_parts import HandClock, a_config, a_group, a_metrics_line

ROOT = Path(__file__).parents[2]
WORKERS = ("trainer-0", "relay-0", "relay-1", "rollout-0", "rollout-1", "environment-0")


class Stage:
    """A terminal with what a run would tell it."""

    def __init__(self, console: Console, steps: int = 4):
        self.clock, self.events = HandClock(), EventBus()
        config = a_config(trainer={"steps": steps, "groups_per_step": 2, "group_size": 2})
        self.terminal = Terminal(self.events, config, run_dir=Path("runs/small"), now=self.clock, console=console)

    def start(self):
        emit = self.events.emit
        self.terminal.open()
        emit(ProcessStarted(name="relays", pid=20, command="mpirun -n 2 python -m laminar.workers.relay.main"))
        for number, worker in enumerate(WORKERS):
            self.clock.now += 1
            emit(WorkerJoined(worker=worker, host="host-a", pid=30 + number))
            emit(WorkerProgress(worker=worker, text="loading the model"))
            emit(WorkerReady(worker=worker, detail="[torch] engine"))
        emit(WeightsPublished(policy_version=0, publish_stall_s=0.003, nbytes=3_200_000))
        emit(
            WeightsBroadcast(
                policy_version=0,
                seconds=0.01,
                nbytes=3_200_000,
                received_bytes=3_200_000,
                relays=2,
                damaged=0,
                repairs=0,
                error="",
            )
        )
        for rollout in ("rollout-0", "rollout-1"):
            emit(WeightsPulled(rollout=rollout, policy_version=0, seconds=0.02))

    def step(self, step, **changes):
        emit = self.events.emit
        self.clock.now += 2
        groups = [a_group(2 * step + k, version=max(0, step - 1 - k), trainer=step - 1) for k in range(2)]
        for group in groups:
            emit(GroupCompleted(group=group))
        emit(TokensAppended(rollout="rollout-0", tokens=12, late_tokens=0, kv_utilization=0.5))
        emit(StepStarted(step=step, groups=2))
        emit(WeightsPublished(policy_version=step, publish_stall_s=0.003, nbytes=3_200_000))
        emit(StepFinished(step=step, policy_version=step, groups=groups, train_s=1.0, trainer_metrics={}))
        emit(MetricsReported(line=a_metrics_line(step, **changes)))


def plain_stage(**options):
    file = io.StringIO()
    return Stage(Console(file=file, width=80, force_terminal=False), **options), file


def terminal_stage(width=100, **options):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system="truecolor", _environ={})
    return Stage(console, **options), file


def test_plain_lines_tell_the_start():
    stage, file = plain_stage()
    stage.start()
    text = file.getvalue()
    assert "\x1b" not in text and "\r" not in text
    assert "run directory  runs/small" in text
    assert "started relays, process 20: mpirun -n 2 python -m laminar.workers.relay.main" in text
    assert "rollout-1: loading the model" in text
    assert "rollout-1 is ready (host-a, process 34): [torch] engine" in text
    assert "all 6 workers are ready after 6.0 s" in text
    assert "initial weights published, 3.2 MB in 3 ms" in text
    assert "all rollouts serve them and generate after 6.0 s" in text


def test_plain_lines_are_whole_and_one_per_step():
    stage, file = plain_stage(steps=45)
    stage.start()
    before = len(file.getvalue().splitlines())
    for step in range(1, 46):
        stage.step(step)
    lines = file.getvalue().splitlines()[before:]
    assert len(lines) == 45 + 3  # the header comes again after 20 steps
    headers = [number for number, line in enumerate(lines) if line.split()[0] == "step"]
    assert headers == [0, 21, 42]
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split()[:3] == ["1/45", "0.2500", "0.50/1"]


def test_plain_output_says_now_and_then_what_a_start_waits_for():
    stage, file = plain_stage()
    stage.terminal.open()
    stage.events.emit(WorkerJoined(worker="trainer-0", host="h", pid=1))
    stage.events.emit(WorkerReady(worker="relay-0", detail=""))
    for _ in range(40):
        stage.clock.now += 1
        stage.terminal.refresh()
    waits = [line for line in file.getvalue().splitlines() if "waiting for" in line]
    assert waits == [
        f"{seconds}.0 s: 1 of 6 workers ready, waiting for trainer-0 (connected), relay-1 (not connected), "
        "rollout-0 (not connected) and 2 more"
        for seconds in (15, 30)
    ]


def test_weights_that_come_early_are_not_the_initial_ones():
    stage, file = plain_stage()
    stage.events.emit(WeightsPublished(policy_version=0, publish_stall_s=0.003, nbytes=1))
    stage.events.emit(WeightsPublished(policy_version=1, publish_stall_s=0.003, nbytes=1))
    assert file.getvalue().count("initial weights published") == 1


def test_notices_and_rejected_prompts():
    stage, file = plain_stage()
    stage.events.emit(Notice(level="info", text="the data has ended [really]"))
    stage.events.emit(Notice(level="warning", text="bad\x1b[2J news"))
    for prompt_id in range(10):
        stage.events.emit(PromptRejected(prompt_id=prompt_id, source="s", reason="2000 tokens"))
    lines = file.getvalue().splitlines()
    assert lines[:2] == ["the data has ended [really]", "warning: bad\\x1b[2J news"]
    assert lines[2] == "warning: prompt 0 of s is left out: 2000 tokens"
    assert len(lines) == 2 + 3 + 1


def test_summary():
    stage, file = plain_stage(steps=8)
    stage.start()
    for step in range(1, 9):
        stage.step(step)
    stage.events.emit(GroupDropped(group=a_group(99), reason="no reward"))
    stage.events.emit(CheckpointFinished(step=8, path="ckpt/step-000008", seconds=0.2, nbytes=12_000_000, error=""))
    stage.terminal.finish("finished: 8 steps")
    text = file.getvalue().partition("finished: 8 steps\n")[2]
    rows = {line[:16].strip(): line[18:] for line in text.splitlines() if line[:1].isalpha()}
    assert rows["wall time"] == "22.0 s, first step after 8.0 s"
    assert rows["reward"] == "0.5000 -> 1.7500 (mean of the first and the last 3 steps)"
    assert rows["trajectories"] == "32 trained"
    assert rows["generated"] == "96 tokens, 12.3k tokens/s"
    assert rows["staleness"] == "mean 0.44, max 1 (0: 56 %, 1: 44 %)"
    assert rows["trainer idle"] == "25 % (trajectories 20 %, paused 5 %)"
    assert rows["rollout idle"] == "10 % (pulling 10 %)"
    assert rows["publish stall"] == "mean 3 ms, max 3 ms, 3.2 MB each"
    assert rows["broadcast"] == "mean 10 ms, max 10 ms"
    assert rows["pull"] == "mean 20 ms, max 20 ms, 2 pulls"
    assert (rows["rejected prompts"], rows["dropped groups"]) == ("0", "1")
    assert rows["checkpoint"] == "ckpt/step-000008 (12.0 MB, written in 200 ms)"
    assert text.splitlines()[-6:] == [
        "    2.000       ▂█",
        "               ▅██",
        "             ▂▇███",
        "            ▄█████",
        "    0.250 ▁▇██████",
        "          reward, steps 1 to 8",
    ]


def test_summary_names_the_exported_model(tmp_path):
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_text("{}")
    stage, file = plain_stage()
    stage.events.emit(CheckpointFinished(step=1, path=str(tmp_path), seconds=0.2, nbytes=1, error=""))
    stage.terminal.finish("stopped")
    assert f'AutoModelForCausalLM.from_pretrained("{tmp_path}/huggingface")' in file.getvalue()


def test_summary_of_a_run_without_steps():
    stage, file = plain_stage()
    stage.terminal.open()
    stage.terminal.finish("stopped before the first step")
    assert file.getvalue().splitlines()[-4:] == [
        "stopped before the first step",
        "wall time         0 ms",
        "rejected prompts  0",
        "dropped groups    0",
    ]


def test_bar_of_the_warm_up_and_of_the_run():
    stage, file = terminal_stage()
    stage.terminal.open()
    stage.events.emit(WorkerProgress(worker="rollout-0", text="starting the engine"))
    stage.clock.now += 12
    stage.terminal.refresh()
    shown = file.getvalue()
    assert "starting" in shown and "12.0 s" in shown
    assert "0 of 6 workers ready, waiting for trainer-0 (not connected)" in shown
    stage.start()
    for step in (1, 2):
        stage.step(step)
    file.truncate(0)
    stage.clock.now += 1
    stage.terminal.refresh()
    shown = file.getvalue()
    assert "step 2/4" in shown and "about 4.0 s left" in shown
    assert "step 3: waiting for trajectories, 0 of 2 groups in the buffer" in shown


def test_terminal_is_left_as_it_was_and_no_line_is_too_wide():
    stage, file = terminal_stage(width=60)
    stage.start()
    for step in range(1, 5):
        stage.step(step)
    stage.terminal.finish("finished: 4 steps")
    stage.terminal.close()
    text = file.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden and is back
    for line in text.splitlines():
        assert len(_without_codes(line)) <= 60, line
    assert "finished: 4 steps" in text and "0.6250 (mean" not in text


def test_warnings_stand_out():
    stage, file = terminal_stage()
    stage.events.emit(Notice(level="warning", text="the disk is full"))
    assert "\x1b[1;33mwarning: the disk is full\x1b[0m" in file.getvalue()


def test_a_terminal_that_is_gone_does_not_end_the_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    notices = []
    stage = Stage(Console(file=Gone(), width=80, force_terminal=True))
    stage.events.subscribe(notices.append, Notice)
    stage.start()
    stage.step(1)
    stage.terminal.finish("finished")
    assert len(notices) == 1 and "the run goes on" in notices[0].text


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}])
def test_piped_output(environment):
    """A real pipe: no bar, nothing that the encoding lacks, flushed; with FORCE_COLOR colours but no cursor moves."""
    script = (
        "from tests.observability.test_terminal import Stage\n"
        "from laminar.observability.terminal import default_console\n"
        "stage = Stage(default_console())\n"
        "stage.start()\n"
        "for step in (1, 2, 3): stage.step(step)\n"
        "stage.terminal.finish('finished: 3 steps, caf\\u00e9')\n"
        "import os; os._exit(0)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, env={"PATH": "/usr/bin", **environment})
    assert done.returncode == 0, done.stderr.decode()
    assert b"finished: 3 steps, caf" in done.stdout and b"\x1b[?25" not in done.stdout and b"\r" not in done.stdout
    assert (b"\x1b[" in done.stdout) == ("FORCE_COLOR" in environment)
    assert ("█".encode() in done.stdout) == ("PYTHONIOENCODING" not in environment)


def test_a_reader_that_leaves_does_not_end_the_run():
    script = (
        "import sys\n"
        "from tests.observability.test_terminal import Stage\n"
        "from laminar.observability.terminal import default_console\n"
        "stage = Stage(default_console(), steps=1500)\n"
        "for step in range(1, 1501): stage.step(step)\n"
        "stage.terminal.finish('finished')\n"
        "print('the run went on', file=sys.stderr, flush=True)\n"
    )
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert b"the run went on" in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)


async def test_refresh_forever_redraws_while_no_event_comes():
    stage, _ = terminal_stage()
    stage.terminal.open()
    drawn = asyncio.Event()
    stage.terminal.refresh = drawn.set
    task = asyncio.create_task(stage.terminal.refresh_forever())
    async with asyncio.timeout(10):
        await drawn.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    stage.terminal.close()


def _without_codes(line):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).replace("\r", "")

"""Real runs that lose their controller, or stop and go on: nothing is restarted that lives, and every prompt ends once."""

import asyncio
import contextlib
import json
import os
import re
import select
import shutil
import signal
import sys
from os import pidfd_open

import pytest

from laminar.cli import main
from laminar.controller.journal.restore import read_meta, restore
from laminar.controller.journal.tables import JOURNAL, open_journal
from laminar.errors import UserError
from laminar.launch import checkpoint_choice
from laminar.launch.preflight import preflight
from laminar.launch.records import create_records, note
from laminar.launch.resume import PIECE_BYTES, PIECES, fingerprints, model_fingerprint, take_up
from laminar.launch.run_lock import RunLock
from laminar.observability.run_directory import RunDirectory
from laminar.weights.checkpoint_marker import CheckpointMarker, sum_files, write_marker
from tests.launch.live_run import LiveRun, nothing_left, write_config
from tests.tiny_models import make_model


class Resumed(LiveRun):
    """`laminar train --resume` as a child process."""

    def __init__(self, run_dir, name, *options):
        super().__init__("", run_dir, name)
        self._command = [sys.executable, "-m", "laminar", "train", "--resume", str(run_dir), *options]


def controller_of(run):
    return json.loads((run.run_dir / "connection.json").read_text())["controller_pid"]


def accounts_of(run):
    return json.loads((run.run_dir / "accounts.json").read_text())


async def test_when_the_controller_is_killed_the_run_goes_on_with_the_same_workers(runs, tmp_path, model):
    config, name = write_config(tmp_path, model, trainer__steps=12, trainer__checkpoint_every=4)
    run = await LiveRun(config, tmp_path / "run", name).start()
    runs.append(run)
    await run.line(r"^ *3/12")
    workers = set(run.processes()) - {controller_of(run)}
    os.kill(controller_of(run), signal.SIGKILL)
    await run.line("the controller was killed .SIGKILL.; starting it again")
    await run.line(r"taking up the run after step \d+")
    await run.line(r"^ *9/12")
    assert workers <= set(run.processes()), "a worker was restarted"
    assert await run.end() == 0, run.output
    nothing_left(run)

    assert [line["step"] for line in run.lines("metrics.jsonl")][-1] == 12
    assert not [line for line in run.lines("events.jsonl") if line["event"] in ("WorkerReplaced", "TrainerRestarted")]
    trained = [line["id"] for line in run.lines("trajectories.jsonl")]
    assert len(set(trained)) == 12 * 4 * 2
    accounts = accounts_of(run)
    assert (accounts["trained"], accounts["problems"]) == (48, [])
    assert accounts["steps"] == {str(step): 4 for step in range(1, 13)}
    assert "the sums are right" in run.output


async def test_a_stopped_run_and_one_that_lost_its_supervisor_go_on(runs, tmp_path, model):
    """The supervisor takes all that it has started with it; --resume does not wait for the last of them to end."""
    config, name = write_config(tmp_path, model, trainer__steps=1000, trainer__checkpoint_every=3)
    run = await LiveRun(config, tmp_path / "run", name).start()
    runs.append(run)
    await run.line(r"^ *4/")
    run.process.send_signal(signal.SIGINT)
    assert await run.end() == 0, run.output
    nothing_left(run)
    stopped = int(re.search(r"ended after step (\d+) of 1000", run.output)[1])

    again = await Resumed(tmp_path / "run", name).start()
    runs.append(again)
    await again.line(f"from the checkpoint of step {stopped}")
    await again.line(f"^ *{stopped + 1}/")
    await again.line(rf"^ *{stopped + 5}/")
    controller, old = pidfd_open(controller_of(again)), set(again.processes())
    again.process.kill()
    await again.process.wait()

    last = await Resumed(tmp_path / "run", name, "--set", f"trainer.steps={stopped + 10}").start()
    runs.append(last)
    await last.line(rf"trainer.steps: 1000 -> {stopped + 10}")
    await last.line(r"the trainer goes on from step \d+, and \d+ groups return to the buffer")
    assert not old & set(last.processes())
    assert select.select([controller], [], [], 0)[0], "the old controller lives"
    os.close(controller)
    assert await last.end() == 0, last.output
    nothing_left(last)
    accounts = accounts_of(last)
    assert accounts["problems"] == []
    assert accounts["steps"].keys() == {str(step) for step in range(1, stopped + 11)}
    assert accounts["positions"] == accounts["trained"] + accounts["evicted"] + accounts["in_flight"]


async def test_a_trainer_whose_newest_checkpoint_is_damaged_goes_back_to_an_older_one(runs, tmp_path, model):
    """Found when a lost rank's successors load it; the run is then taken up again from the one before."""
    config, name = write_config(
        tmp_path, model, trainer__steps=1000, trainer__checkpoint_every=4, trainer__keep_checkpoints=2
    )
    run = await LiveRun(config, tmp_path / "run", name).start()
    runs.append(run)
    await run.line(r"^ *9/")  # steps 4 and 8 are kept
    await run.attach("pause")
    newest = max((run.run_dir / "checkpoints").glob("step-*"))
    step = int(newest.name[5:])
    flip(max((newest / "trainer").glob("*.distcp"), key=lambda path: path.stat().st_size))
    os.kill(run.process_of("trainer-0"), signal.SIGKILL)
    await run.line(rf"laminar: {newest}/trainer/__0_0.distcp has another checksum")
    await run.line(rf"going on from the checkpoint of step {step - 4} instead: \d+ steps are trained again")
    await run.line(rf"the trainer goes on from step {step - 4}, and \d+ groups return")
    await run.line(rf"^ *{step + 1}/")
    run.process.send_signal(signal.SIGINT)
    assert await run.end() == 0, run.output
    nothing_left(run)
    steps = int(re.search(r"ended after step (\d+) of", run.output)[1])
    accounts = accounts_of(run)
    assert (accounts["problems"], set(accounts["steps"])) == ([], {str(step) for step in range(1, steps + 1)})


BY_HAND = {"relays": ("--index", "0"), "trainer": ("1",), "rollouts": ("1",), "environments": ("1",)}


async def test_workers_that_were_started_by_hand_outlive_controller_and_supervisor(runs, tmp_path, model):
    config, name = write_config(
        tmp_path,
        model,
        trainer__steps=100000,
        relay={"count": 1, "transport": "tcp"},
        rollout__replicas=1,
        launch=dict.fromkeys(("trainer", "relays", "rollouts", "environments"), "manual"),
    )
    run = await LiveRun(config, tmp_path / "run", name).start()
    runs.append(run)
    workers = []
    try:
        for part, arguments in BY_HAND.items():  # each waits for the controller's address
            command = ("bash", f"scripts/launch/{part}.sh", str(run.run_dir), *arguments)
            environment = {**os.environ, "LAMINAR_PYTHON": sys.executable}
            workers.append(await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True))
        await run.line(r"^ *3/")
        run.process.kill()  # and with it the controller
        await run.process.wait()

        again = await Resumed(run.run_dir, name).start()
        runs.append(again)
        await again.line(r"taking up the run after step \d+ \(controller 2\)")
        await again.line(r"^ *\d+/")
        again.process.send_signal(signal.SIGINT)
        assert await again.end() == 0, again.output
        assert [await asyncio.wait_for(worker.wait(), 60) for worker in workers] == [0, 0, 0, 0]
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
    nothing_left(again)
    assert "was lost" not in again.output
    assert not [line for line in again.lines("events.jsonl") if line["event"] == "TrainerRestarted"]
    steps = int(re.search(r"ended after step (\d+) of", again.output)[1])
    assert accounts_of(again)["steps"] == {str(step): 4 for step in range(1, steps + 1)}


# ------------------------------------------------------------ what is refused


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory, model):
    """A run directory as a run of one step leaves it, without the run."""
    folder = tmp_path_factory.mktemp("ended")
    path, _ = write_config(folder, model)
    config = preflight(path, [])
    RunDirectory.create(folder / "run", config, overwrite=False).close()
    run_id = create_records(folder / "run", config, fingerprints(config))
    connection = open_journal(folder / "run" / JOURNAL)
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    checkpoint.mkdir()
    marker = {"step": 1, "policy_version": 1, "state": {"run_id": run_id}}
    (checkpoint / "complete.json").write_text(json.dumps(marker))
    connection.execute("INSERT INTO checkpoints VALUES (1, ?, 1)", (str(checkpoint),))
    note(connection, step="1", issued="1", policy_version="1", life="1")
    connection.close()
    return folder


@pytest.fixture
def run_dir(ended_run, tmp_path):
    shutil.copytree(ended_run / "run", tmp_path / "run")
    return tmp_path / "run"


def test_a_run_that_has_ended_can_be_taken_up_and_its_config_changed(run_dir):
    config, run_id = take_up(run_dir, ["trainer.steps=77", "trainer.optimizer.learning_rate=0.5"])
    assert config.trainer.steps == 77
    again, same = take_up(run_dir, [])
    assert (again, same) == (config, run_id)


def test_workers_by_hand_that_may_wait_with_the_old_values_are_not_taken_up_with_new_ones(run_dir):
    take_up(run_dir, ["launch.trainer=manual"])
    (run_dir / "connection.json").write_text("")  # as a killed run leaves it
    with pytest.raises(UserError, match=r"trainer.steps: launch.trainer is manual.*remove .*connection.json"):
        take_up(run_dir, ["trainer.steps=77"])
    take_up(run_dir, ["rollout.restarts=7"])
    (run_dir / "connection.json").unlink()
    take_up(run_dir, ["trainer.steps=77"])


def test_what_was_asked_of_the_run_before_is_over(run_dir):
    connection = open_journal(run_dir / JOURNAL)
    note(connection, asked='["stop"]')
    assert restore(connection).asked == ("stop",)
    take_up(run_dir, [])
    assert restore(connection).asked == ()
    connection.close()


def test_a_checkpoint_from_before_there_were_checksums_is_taken_with_a_note(run_dir, capsys):
    take_up(run_dir, [])
    assert "from the checkpoint of step 1; it is of an older laminar and has no checksums" in capsys.readouterr().out


def test_where_no_older_checkpoint_is_sound_one_that_is_incomplete_damaged_or_foreign_is_refused(run_dir):
    marker = run_dir / "checkpoints" / "step-000001" / "complete.json"
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps(content | {"state": {"run_id": "another"}}))
    with pytest.raises(UserError, match="a checkpoint of run another, step 1"):
        take_up(run_dir, [])
    marker.write_text("{")
    with pytest.raises(UserError, match="complete.json is damaged: .* Put one of them back as it was, or start a new"):
        take_up(run_dir, [])
    marker.unlink()
    with pytest.raises(UserError, match="not a complete checkpoint: it has no complete.json"):
        take_up(run_dir, [])
    marker.parent.rmdir()
    with pytest.raises(UserError, match=r"the checkpoints of steps \[1\] are gone"):
        take_up(run_dir, [])


@pytest.fixture
def checkpoints(run_dir):
    """Those of steps 2 and 4 of a run that has made 5 steps of one group each, with checksums; 1 is no longer kept."""
    connection = open_journal(run_dir / JOURNAL)
    run_id = read_meta(connection)["run_id"]
    folder = run_dir / "checkpoints"
    shutil.rmtree(folder / "step-000001")
    for step in (2, 4):
        checkpoint = folder / f"step-{step:06d}"
        (checkpoint / "trainer").mkdir(parents=True)
        (checkpoint / "trainer" / "__0_0.distcp").write_bytes(bytes([step]) * 1000)
        files = sum_files(checkpoint, ["trainer/__0_0.distcp"])
        state = json.dumps({"run_id": run_id})
        write_marker(checkpoint, CheckpointMarker(step=step, policy_version=step, state=state, files=files))
        connection.execute("INSERT INTO checkpoints VALUES (?, ?, ?)", (step, str(checkpoint), step))
    for step in range(1, 6):
        values = (step, step, 0, step, "trained", step, None, None, None)
        connection.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        if step > 2:  # the others are in both checkpoints
            connection.execute("INSERT INTO prompts VALUES (?, 's', 'text', ?, '', '')", (step, bytes(4)))
    note(connection, step="5", issued="5", policy_version="5")
    connection.close()
    return folder


def steps_known(run_dir):
    connection = open_journal(run_dir / JOURNAL)
    state = restore(connection)
    known = [step for (step,) in connection.execute("SELECT step FROM checkpoints ORDER BY step")]
    connection.close()
    return known, state


def flip(file):
    file.write_bytes(file.read_bytes()[:-1] + b"?")


HARM = {
    "a flipped byte": (lambda folder: flip(folder / "trainer" / "__0_0.distcp"), "__0_0.distcp has another checksum"),
    "a truncated file": (
        lambda folder: (folder / "trainer" / "__0_0.distcp").write_bytes(bytes([4]) * 10),
        "__0_0.distcp has 10 bytes, it was written with 1000",
    ),
    "a missing file": (lambda folder: (folder / "trainer" / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a damaged marker": (lambda folder: flip(folder / "complete.json"), "complete.json is damaged"),
    "no marker": (lambda folder: (folder / "complete.json").unlink(), "step-000004 is not a complete checkpoint"),
}


@pytest.mark.parametrize("harm", HARM)
def test_instead_of_a_damaged_checkpoint_the_next_older_one_is_taken(run_dir, checkpoints, harm, capsys):
    harming, said = HARM[harm]
    harming(checkpoints / "step-000004")
    take_up(run_dir, [])
    output = capsys.readouterr().out
    assert f"warning: {checkpoints}/step-000004" in output and said in output
    assert "going on from the checkpoint of step 2 instead: 3 steps are trained again" in output
    assert f"resuming {run_dir} from the checkpoint of step 2 (1.0 kB, checked in" in output
    known, state = steps_known(run_dir)
    assert known == [1, 2] and state.checkpoint.step == 2
    assert [[group.group_id for group in step] for step in state.since_checkpoint] == [[3], [4], [5]]
    assert not (checkpoints / "step-000004" / "complete.json").exists(), "a checkpoint would be kept in its favour"
    take_up(run_dir, [])
    assert "warning" not in capsys.readouterr().out


def test_a_sound_checkpoint_is_taken_and_what_was_checked_is_said(run_dir, checkpoints, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint_choice, "TOLD_EVERY_S", 0)
    take_up(run_dir, [])
    output = capsys.readouterr().out
    assert f"checking {checkpoints}/step-000004: 1.0 kB of 1.0 kB" in output
    assert f"resuming {run_dir} from the checkpoint of step 4 (1.0 kB, checked in" in output
    assert steps_known(run_dir)[0] == [1, 2, 4]


def test_where_all_are_damaged_the_run_is_left_as_it_is(run_dir, checkpoints, capsys):
    for step in (2, 4):
        flip(checkpoints / f"step-{step:06d}" / "trainer" / "__0_0.distcp")
    before = sorted(run_dir.rglob("*"))
    assert main(["train", "--resume", str(run_dir)]) == 2
    said = capsys.readouterr().err
    assert "step-000004/trainer/__0_0.distcp has another" in said and "step-000002/trainer/__0_0.distcp" in said
    assert "Put one of them back as it was, or start a new run" in said and "are gone" not in said
    assert set(before) <= set(run_dir.rglob("*"))
    assert steps_known(run_dir)[0] == [1, 2, 4]


def test_an_older_checkpoint_is_not_taken_where_the_journal_has_forgotten_what_was_trained_since(run_dir, checkpoints):
    connection = open_journal(run_dir / JOURNAL)
    connection.execute("DELETE FROM prompts WHERE group_id <= 4")  # as with trainer.keep_checkpoints: 1
    connection.close()
    flip(checkpoints / "step-000004" / "trainer" / "__0_0.distcp")
    with pytest.raises(UserError, match="What was trained since an older checkpoint cannot be told"):
        take_up(run_dir, [])


def test_other_data_and_another_config_are_refused(run_dir, ended_run):
    data = ended_run / "data.jsonl"
    before = data.read_text()
    try:
        data.write_text(before + json.dumps({"prompt": "1", "answer": "1"}) + "\n")
        with pytest.raises(UserError, match="data.source: .* has changed since the run began"):
            take_up(run_dir, [])
    finally:
        data.write_text(before)
    with pytest.raises(UserError, match="seed: 5; a resumed run must keep 0"):
        take_up(run_dir, ["seed=5"])


def test_another_model_of_the_same_shape_is_refused(run_dir, model):
    """Its config is the same, and its weights take as many bytes."""
    weights = next(model.glob("*.safetensors"))
    before = weights.read_bytes()
    try:
        make_model(model, seed=1)
        assert len(weights.read_bytes()) == len(before)
        with pytest.raises(UserError, match="model.path: the files in .* are not those that the run began with"):
            take_up(run_dir, [])
    finally:
        weights.write_bytes(before)
    take_up(run_dir, [])


def test_a_large_file_of_weights_is_told_by_pieces_from_everywhere(tmp_path):
    weights, nbytes = tmp_path / "model.safetensors", 3 * PIECES * PIECE_BYTES + 5
    weights.write_bytes(bytes(nbytes))
    found = {model_fingerprint(tmp_path)}
    for place in (0, nbytes // 2, nbytes - 3 * PIECE_BYTES):
        content = bytearray(nbytes)
        content[place : place + 3 * PIECE_BYTES] = b"x" * (3 * PIECE_BYTES)
        weights.write_bytes(content)
        found.add(model_fingerprint(tmp_path))
    assert len(found) == 4


def test_a_damaged_journal_is_refused(run_dir, capsys):
    path = run_dir / "journal.sqlite"
    path.write_bytes(path.read_bytes()[:100] + b"x" * 5000)
    assert main(["train", "--resume", str(run_dir)]) == 2
    said = capsys.readouterr().err
    assert "journal.sqlite: damaged" in said and "Put back a copy of the run directory" in said


@pytest.mark.parametrize("how", ["resumed", "begun", "begun with --overwrite"])
def test_nothing_is_started_where_a_run_lives(ended_run, run_dir, how, capsys):
    config = str(ended_run / "experiment.yaml")
    lock = RunLock(run_dir)
    lock.acquire()
    before = sorted(run_dir.rglob("*"))
    try:
        words = ["--resume", str(run_dir)] if how == "resumed" else [config, "--run-dir", str(run_dir)]
        status = main(["train", *words, *(["--overwrite"] if "--overwrite" in how else [])])
    finally:
        lock.release()
    assert status == 2
    said = capsys.readouterr().err
    assert f"the run of process {os.getpid()} lives there" in said
    assert f"laminar attach {run_dir} -c stop" in said
    assert sorted(run_dir.rglob("*")) == before

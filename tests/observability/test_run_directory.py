from __future__ import annotations

import errno
import json
import os

import pytest

from laminar.config.load import load_config
from laminar.errors import UserError
from laminar.observability.events import (
    EventBus,
    GroupDropped,
    MetricsReported,
    Notice,
    PromptRejected,
    StepFinished,
    TokensAppended,
    WorkerReady,
)
from laminar.observability.run_directory import RunDirectory
from laminar.protocol.connection import Connection, boot_id, process_started
from tests.run_parts import HandClock, a_config, a_group


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def connection(pid, started, boot=None):
    return Connection(
        address="tcp://127.0.0.1:1",
        run_id="r",
        controller_public_key="",
        worker_public_key="",
        worker_secret_key="",
        controller_pid=pid,
        controller_started=started,
        boot_id=boot or boot_id(),
    )


@pytest.fixture
def old_run(tmp_path):
    """A run directory of a run that has ended, with something in it."""
    path = tmp_path / "run"
    RunDirectory.create(path, a_config(), overwrite=False).close()
    (path / "checkpoints" / "step-000001").mkdir()
    (path / "logs" / "trainer-0.log").write_text("log")
    return path


def test_create_writes_what_is_known(tmp_path):
    config = a_config()
    run = RunDirectory.create(tmp_path / "deep" / "run", config, overwrite=False)
    assert load_config(run.path / "config.yaml") == config
    assert run.logs.is_dir() and run.checkpoints.is_dir()
    assert json.loads((run.path / "run.json").read_text())["name"] == "small"
    for name in ("metrics", "trajectories", "events"):
        assert (run.path / f"{name}.jsonl").read_text() == ""


def test_an_empty_folder_is_taken(tmp_path):
    assert RunDirectory.create(tmp_path, a_config(), overwrite=False).path == tmp_path


def test_a_folder_with_anything_in_it_is_refused(old_run):
    with pytest.raises(UserError, match="already and not empty.*--overwrite"):
        RunDirectory.create(old_run, a_config(), overwrite=False)
    assert (old_run / "logs" / "trainer-0.log").exists()


def test_overwrite_replaces_an_ended_run(old_run):
    connection(os.getpid(), -1).write(old_run)  # the process id was reused
    RunDirectory.create(old_run, a_config(name="new"), overwrite=True)
    assert load_config(old_run / "config.yaml").name == "new"
    assert not (old_run / "logs" / "trainer-0.log").exists()
    assert not (old_run / "connection.json").exists()
    assert list((old_run / "checkpoints").iterdir()) == []


def test_overwrite_follows_no_link_out_of_the_folder(old_run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept.txt").write_text("kept")
    (old_run / "link").symlink_to(tmp_path / "mine")
    RunDirectory.create(old_run, a_config(), overwrite=True)
    assert (tmp_path / "mine" / "kept.txt").exists() and not (old_run / "link").exists()


def test_overwrite_leaves_other_folders_alone(tmp_path):
    (tmp_path / "config.yaml").write_text("name: mine")
    with pytest.raises(UserError, match="not a run directory"):
        RunDirectory.create(tmp_path, a_config(), overwrite=True)
    assert (tmp_path / "config.yaml").read_text() == "name: mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_live_run_is_never_touched(old_run, overwrite):
    connection(os.getpid(), process_started(os.getpid())).write(old_run)
    with pytest.raises(UserError, match=f"the run of process {os.getpid()} lives there"):
        RunDirectory.create(old_run, a_config(), overwrite=overwrite)
    assert (old_run / "logs" / "trainer-0.log").exists()


def test_a_run_of_an_earlier_boot_is_not_live(old_run):
    connection(os.getpid(), process_started(os.getpid()), boot="earlier").write(old_run)
    RunDirectory.create(old_run, a_config(), overwrite=True)


def test_overwrite_does_not_delete_what_the_run_needs(old_run, monkeypatch):
    model = old_run / "checkpoints" / "step-000001"
    with pytest.raises(UserError, match="would delete model.path"):
        RunDirectory.create(old_run, a_config(model={"path": str(model)}), overwrite=True)
    monkeypatch.chdir(old_run / "logs")
    with pytest.raises(UserError, match="would delete the working directory"):
        RunDirectory.create(old_run, a_config(), overwrite=True)
    assert model.is_dir()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunDirectory.create(tmp_path / "file", a_config(), overwrite=True)
    with pytest.raises(UserError, match="cannot be written"):
        RunDirectory.create(tmp_path / "file" / "run", a_config(), overwrite=False)


def test_events_become_lines(tmp_path):
    clock, events = HandClock(), EventBus()
    run = RunDirectory.create(tmp_path / "run", a_config(), overwrite=False)
    run.record(events, clock)
    clock.now += 1.5
    events.emit(WorkerReady(worker="rollout-0", detail="torch"))
    events.emit(TokensAppended(rollout="rollout-0", tokens=1, late_tokens=0, kv_utilization=0.0))
    events.emit(PromptRejected(prompt_id=3, source="s", reason="too long"))
    events.emit(MetricsReported(line={"step": 1, "mismatch_kl": float("nan")}))
    events.emit(
        StepFinished(
            step=1, policy_version=3, groups=[a_group(8, version=1, trainer=2)], train_s=0.1, trainer_metrics={}
        )
    )
    events.emit(GroupDropped(group=a_group(9, rewards=(0.5,)), reason="no reward"))
    assert lines_of(run.path / "metrics.jsonl") == [{"step": 1, "mismatch_kl": None}]
    first, second, dropped = lines_of(run.path / "trajectories.jsonl")
    assert first == {
        "id": "8.0",
        "group": 8,
        "prompt_id": 18,
        "source": "spell_backward",
        "policy_version": 1,
        "versions": [[1, 0]],
        "step": 1,
        "staleness": 1,
        "prompt_tokens": 5,
        "response_tokens": 3,
        "turns": 0,
        "environment_s": 0.0,
        "reward": 1.0,
        "reward_parts": None,
        "reward_error": None,
        "finish_reason": "stop",
        "rollout": "rollout-0",
        "generation_s": 1.5,
        "dropped": None,
    }
    assert (second["id"], second["reward"]) == ("8.1", 0.0)
    assert (dropped["id"], dropped["step"], dropped["dropped"]) == ("9.0", None, "no reward")
    assert lines_of(run.path / "events.jsonl") == [
        {"time_s": 1.5, "event": "WorkerReady", "worker": "rollout-0", "detail": "torch"},
        {"time_s": 1.5, "event": "PromptRejected", "prompt_id": 3, "source": "s", "reason": "too long"},
    ]
    run.close()
    events.emit(Notice(level="info", text="late"))
    assert len(lines_of(run.path / "events.jsonl")) == 2


def test_a_full_disk_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch):
    events, notices = EventBus(), []
    run = RunDirectory.create(tmp_path / "run", a_config(), overwrite=False)
    run.record(events, HandClock())
    events.subscribe(notices.append, Notice)

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for step in range(3):
            events.emit(MetricsReported(line={"step": step}))
            events.emit(GroupDropped(group=a_group(), reason="r"))
    assert [notice.level for notice in notices] == ["warning"]
    assert "metrics.jsonl: cannot be written (No space left on device)" in notices[0].text
    assert run.lost_lines == 3 + 6 + 1  # and the notice itself
    events.emit(MetricsReported(line={"step": 3}))
    assert lines_of(run.path / "metrics.jsonl") == [{"step": 3}]

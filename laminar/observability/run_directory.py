"""The folder that a run leaves behind: resolved config, logs, checkpoints, and what happened as JSON lines.

  run.json            what the folder is: its marker
  config.yaml         the resolved config; `laminar train RUN_DIR/config.yaml` runs it again
  logs/               one log per process
  checkpoints/        one folder per checkpoint
  metrics.jsonl       one line per step, and one per evaluation
  trajectories.jsonl  one line per trajectory that was trained or dropped
  trace.json          who did what when, for ui.perfetto.dev; trace-2.json of a controller that went on with the run
  journal.sqlite      what the next controller needs; accounts.json at the end: what became of every prompt
  evaluations.jsonl   one line per response of a complete evaluation
  events.jsonl        workers, weights, checkpoints, rejected prompts and notices, with seconds since the start

Invariants: a folder that holds anything is never written over unless the user said so and it is a run directory of a
run that has ended; a line that cannot be written costs that line, never the run.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import laminar
from laminar.config.data_schema import FileSource
from laminar.config.held_out import held_out, in_its_words
from laminar.config.load import to_yaml
from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError
from laminar.observability import events as kinds
from laminar.observability.events import (
    EvaluationFinished,
    EvaluationResponses,
    EventBus,
    GroupDropped,
    MetricsReported,
    Notice,
    StepFinished,
)
from laminar.observability.json_lines import JsonLines
from laminar.observability.trace import Trace
from laminar.protocol.connection import CONNECTION_FILE, Connection, boot_id, process_started
from laminar.trajectory import Trajectory

MARKER = "run.json"
CONFIG = "config.yaml"
TRACE = "trace.json"

# What events.jsonl tells: everything that happens seldom and that a person would look for.
TOLD_EVENTS: tuple[type, ...] = (
    kinds.ProcessStarted,
    kinds.WorkerJoined,
    kinds.WorkerReady,
    kinds.WorkerReplaced,
    kinds.RolloutLost,
    kinds.RolloutHealthChanged,
    kinds.TrajectoriesRecovered,
    kinds.TrainerRestarted,
    kinds.RolloutsRepacked,
    kinds.KvMoved,
    kinds.RepackSettled,
    kinds.PromptRejected,
    kinds.WeightsPublished,
    kinds.WeightsBroadcast,
    kinds.WeightsPulled,
    kinds.CheckpointFinished,
    kinds.EvaluationStarted,
    kinds.EvaluationStartedOver,
    kinds.EvaluationFinished,
    kinds.Notice,
)


def check_is_one(path: Path) -> None:
    """Raises UserError if the folder is no run directory."""
    if not ((path / MARKER).is_file() and (path / CONFIG).is_file()):
        raise UserError(
            f"{path}: not a run directory (it has no {MARKER} and {CONFIG}); give the folder that `laminar train` named"
        )


class RunDirectory:
    """One run directory; made by `create`, filled by the events that it subscribes to in `record`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self._lines: dict[str, JsonLines] = {}
        self._events: EventBus | None = None
        self._now: Callable[[], float] = lambda: 0.0
        self._started = 0.0
        self._told_of_error = False

    @classmethod
    def create(cls, path: Path, config: ExperimentConfig, overwrite: bool) -> RunDirectory:
        """Make the folder with everything that is known before the run starts.

        Raises:
            UserError: something is there already (with `overwrite`: something that is no run directory, or a run that
                is alive), or the folder cannot be written.
        """
        path = path.resolve()
        try:
            if path.exists() and not path.is_dir():
                raise UserError(f"{path}: is a file; give --run-dir a folder that does not exist yet")
            if path.is_dir() and any(path.iterdir()):
                _make_room(path, config, overwrite)
            path.mkdir(parents=True, exist_ok=True)
            _write_marker(path, config)
            (path / CONFIG).write_text(to_yaml(config), encoding="utf-8")
            run_directory = cls(path)
            run_directory._open_files()
        except OSError as error:
            raise UserError(
                f"{error.filename or path}: cannot be written ({error.strerror}); "
                "choose another run directory with --run-dir"
            ) from error
        return run_directory

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The folder of a run that goes on, and has no other process that writes: what happens is added to what is there.

        Raises:
            UserError: it is no run directory, or cannot be written.
        """
        path = path.resolve()
        check_is_one(path)
        run_directory = cls(path)
        try:
            run_directory._open_files()
        except OSError as error:
            raise UserError(f"{error.filename or path}: cannot be written ({error.strerror})") from error
        return run_directory

    def _open_files(self) -> None:
        self.logs.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        for name in ("metrics", "trajectories", "evaluations", "events"):
            self._lines[name] = JsonLines(self.path / f"{name}.jsonl", self._on_write_error)

    def _new_trace(self) -> Path:
        """One per controller: its clock, and what it had under way, end with it."""
        number, file = 1, self.path / TRACE
        while file.exists():
            number += 1
            file = self.path / f"{Path(TRACE).stem}-{number}.json"
        return file

    @property
    def lost_lines(self) -> int:
        """Lines that could not be written, of all files together."""
        return sum(lines.lost for lines in self._lines.values())

    def record(self, events: EventBus, now: Callable[[], float]) -> None:
        """Write down what happens from now on; `now` is the controller's clock, in seconds."""
        self._lines["trace"] = JsonLines(self._new_trace(), self._on_write_error, array=True)
        self._events, self._now, self._started = events, now, now()
        Trace(events, lambda: now() - self._started, lambda lines: self._write("trace", lines))
        events.subscribe(self._on_metrics, MetricsReported)
        events.subscribe(self._on_step, StepFinished)
        events.subscribe(self._on_dropped, GroupDropped)
        events.subscribe(self._on_responses, EvaluationResponses)
        events.subscribe(self._on_evaluation, EvaluationFinished)
        events.subscribe(self._on_told_event, *TOLD_EVENTS)

    def close(self) -> None:
        """Close the files; events that come later are not recorded."""
        for lines in self._lines.values():
            lines.close()
        self._lines.clear()

    def _write(self, name: str, new: Iterable[dict[str, Any]]) -> None:
        if lines := self._lines.get(name):
            lines.write_all(new)

    def _on_metrics(self, event: MetricsReported) -> None:
        self._write("metrics", [event.line])

    def _on_step(self, event: StepFinished) -> None:
        trajectories = (trajectory for group in event.groups for trajectory in group.trajectories)
        self._write("trajectories", (_trajectory_line(trajectory, step=event.step) for trajectory in trajectories))

    def _on_dropped(self, event: GroupDropped) -> None:
        trajectories = event.group.trajectories
        self._write("trajectories", (_trajectory_line(trajectory, dropped=event.reason) for trajectory in trajectories))

    def _on_responses(self, event: EvaluationResponses) -> None:
        self._write("evaluations", (asdict(response) for response in event.responses))

    def _on_evaluation(self, event: EvaluationFinished) -> None:
        result, time_s = event.result, round(self._now() - self._started, 6)
        line = {"step": result.step, "policy_version": result.policy_version, "time_s": time_s}
        self._write("metrics", [line | result.figures()])

    def _on_told_event(self, event: Any) -> None:
        line = {"time_s": round(self._now() - self._started, 6), "event": type(event).__name__, **asdict(event)}
        self._write("events", [line])

    def _on_write_error(self, path: Path, error: OSError) -> None:
        if self._told_of_error or self._events is None:
            return
        self._told_of_error = True
        text = f"{path}: cannot be written ({error.strerror}); the run goes on, lines that do not fit are lost"
        self._events.emit(Notice(level="warning", text=text))


def _trajectory_line(trajectory: Trajectory, *, step: int | None = None, dropped: str | None = None) -> dict[str, Any]:
    started, finished = trajectory.started_at, trajectory.finished_at
    return {
        "id": trajectory.trajectory_id,
        "group": trajectory.group_id,
        "prompt_id": trajectory.prompt.prompt_id,
        "source": trajectory.prompt.source,
        "policy_version": trajectory.policy_version,
        "versions": trajectory.versions,  # [version, index of its first token]; more than one under `partial`
        "step": step,
        "staleness": trajectory.staleness,
        "prompt_tokens": len(trajectory.prompt.token_ids),
        "response_tokens": trajectory.num_tokens,  # observations included
        "turns": len(trajectory.turns),  # that an environment has answered
        "environment_s": round(trajectory.environment_s, 6),
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "reward_error": trajectory.reward_error,  # why the reward is 0, under `reward.on_invalid: zero`
        "finish_reason": trajectory.finish_reason,
        "rollout": trajectory.rollout,
        "generation_s": None if started is None or finished is None else round(finished - started, 6),
        "dropped": dropped,
    }


def live_controller(path: Path) -> int | None:
    """Process id of the controller whose run lives in this folder; None if there is none on this machine.

    A controller on another machine, over a shared file system, cannot be seen from here.
    """
    try:
        connection = Connection.read(path / CONNECTION_FILE)
    except (UserError, OSError):
        return None
    if connection.boot_id != boot_id() or process_started(connection.controller_pid) != connection.controller_started:
        return None
    return connection.controller_pid


def _make_room(path: Path, config: ExperimentConfig, overwrite: bool) -> None:
    """Delete an ended run's directory for a new one, or refuse to."""
    pid = live_controller(path)
    if pid is not None:
        raise UserError(
            f"{path}: the run of process {pid} lives there. Choose another folder with --run-dir, "
            f"or end that run first (laminar attach {path} -c stop)"
        )
    if not overwrite:
        raise UserError(
            f"{path}: is there already and not empty. Choose another folder with --run-dir, or replace it with --overwrite"
        )
    if not ((path / MARKER).is_file() and (path / CONFIG).is_file()):
        raise UserError(
            f"{path}: not a run directory (it has no {MARKER} and {CONFIG}), so --overwrite leaves it alone. "
            "Choose another folder with --run-dir, or delete it yourself"
        )
    for what, used in _used_paths(config):
        if used == path or path in used.parents:
            raise UserError(f"{path}: --overwrite would delete {what} ({used}). Choose another folder with --run-dir")
    # The marker goes last: should this be interrupted, the folder is still known for what it is.
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name in (MARKER, CONFIG)):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _used_paths(config: ExperimentConfig) -> Iterator[tuple[str, Path]]:
    """What the new run needs, and what must therefore not lie in a folder that is deleted."""
    yield "the working directory", Path.cwd()
    yield "model.path", Path(config.model.path).resolve()
    if config.algorithm.kl.reference_path:
        yield "algorithm.kl.reference_path", Path(config.algorithm.kl.reference_path).resolve()
    if config.algorithm.critic and config.algorithm.critic.path:
        yield "algorithm.critic.path", Path(config.algorithm.critic.path).resolve()
    for key, source in config.data.single_sources():
        if isinstance(source, FileSource):
            yield f"{key}.path", Path(source.path).resolve()
    for key, source in held_out(config).data.single_sources() if config.evaluation is not None else ():
        if isinstance(source, FileSource):
            yield in_its_words(f"{key}.path"), Path(source.path).resolve()


def _write_marker(path: Path, config: ExperimentConfig) -> None:
    """Say what the folder is. Of two runs that start at once in one folder, only one gets through here."""
    about = {
        "laminar": laminar.__version__,
        "name": config.name,
        "host": socket.gethostname(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    try:
        with open(path / MARKER, "x", encoding="utf-8") as file:
            json.dump(about, file, indent=1)
    except FileExistsError:
        raise UserError(f"{path}: another run has just started there; choose another folder with --run-dir") from None

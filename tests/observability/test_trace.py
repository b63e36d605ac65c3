"""The trace's lines: spans that never overlap on a track, arrows between spans, and a file that a crash leaves loadable."""

import json
from collections import defaultdict

import pytest

from laminar.observability.events import (
    EventBus,
    GroupDropped,
    StepFinished,
    StepStarted,
    TrajectoryFinished,
    TrajectoryMoved,
    TrajectoryOrphaned,
    TrajectoryStarted,
    WeightsBroadcast,
    WeightsPulled,
)
from laminar.observability.run_directory import RunDirectory
from laminar.observability.trace import Trace
from tests.run_parts import HandClock, a_config, a_group
from tests.simulation.small_cluster import Recorded, experiment
from tests.simulation.test_cluster import _long_tailed


class Written:
    def __init__(self):
        self.events, self.now, self.lines = EventBus(), HandClock(0.0), []
        Trace(self.events, self.now, self.lines.extend)

    def of(self, phase):
        return [line for line in self.lines if line["ph"] == phase]


@pytest.fixture
def written():
    return Written()


def start(written, trajectory, rollout):
    trajectory.rollout = rollout
    written.events.emit(TrajectoryStarted(trajectory=trajectory))


def test_trajectories_at_once_have_tracks_of_their_own_which_are_used_again(written):
    group, later = a_group(0), a_group(1)
    for trajectory in group.trajectories:
        start(written, trajectory, "rollout-0")
    written.now.now = 2.0
    written.events.emit(TrajectoryFinished(trajectory=group.trajectories[0]))
    start(written, later.trajectories[0], "rollout-0")
    assert [line["tid"] for line in written.of("B")] == [1, 2, 1]
    assert [(line["ts"], line["tid"]) for line in written.of("E")] == [(2_000_000, 1)]
    names = {line["pid"]: line["args"]["name"] for line in written.of("M")}
    assert names[written.of("B")[0]["pid"]] == "rollout-0"


def test_a_move_is_an_arrow_from_the_span_that_ends_to_the_one_that_begins(written):
    trajectory = a_group(0).trajectories[0]
    start(written, trajectory, "rollout-0")
    written.now.now = 3.0
    written.events.emit(TrajectoryMoved(trajectory=trajectory, rollout="rollout-1"))
    phases = [line["ph"] for line in written.lines if line["ph"] != "M"]
    assert phases == ["B", "s", "E", "B", "f"]
    (begin, end), (out, into) = written.of("B"), (*written.of("s"), *written.of("f"))
    assert (out["pid"], out["tid"]) == (begin["pid"], begin["tid"])
    assert (into["pid"], into["tid"]) == (end["pid"], end["tid"])
    assert out["id"] == into["id"] and begin["pid"] != end["pid"]


def test_an_orphan_ends_where_it_was_and_goes_on_without_an_arrow(written):
    trajectory = a_group(0).trajectories[0]
    start(written, trajectory, "rollout-0")
    written.events.emit(TrajectoryOrphaned(trajectory=trajectory))
    written.events.emit(TrajectoryMoved(trajectory=trajectory, rollout="rollout-1"))
    assert not written.of("s") and not written.of("f") and len(written.of("B")) == 2
    written.events.emit(GroupDropped(group=a_group(0), reason="too old"))
    assert len(written.of("E")) == 2


def test_pulls_broadcasts_and_steps(written):
    written.now.now = 10.0
    written.events.emit(WeightsPulled(rollout="rollout-0", policy_version=4, seconds=0.5))
    written.events.emit(
        WeightsBroadcast(
            policy_version=4, seconds=2.0, nbytes=1, received_bytes=1, relays=1, damaged=0, repairs=0, error=""
        )
    )
    assert [(line["name"], line["ts"], line["dur"]) for line in written.of("X")] == [
        ("pull version 4", 9_500_000, 500_000),
        ("broadcast version 4", 8_000_000, 2_000_000),
    ]
    written.events.emit(StepStarted(step=1, groups=2))
    written.events.emit(StepStarted(step=1, groups=2))  # the trainer was lost half-way
    written.events.emit(StepFinished(step=1, policy_version=1, groups=[], train_s=1.0, trainer_metrics={}))
    assert [line["ph"] for line in written.lines[-4:]] == ["B", "E", "B", "E"]


def test_what_a_crash_leaves_can_be_loaded(tmp_path):
    run, events = RunDirectory.create(tmp_path / "run", a_config(), overwrite=False), EventBus()
    run.record(events, HandClock())
    trajectory = a_group(0).trajectories[0]
    events.emit(TrajectoryStarted(trajectory=trajectory))
    text = (tmp_path / "run" / "trace.json").read_text()  # nothing was closed
    lines = json.loads(text.rstrip().removesuffix(",") + "]")
    assert lines[-1]["ph"] == "B" and lines[-1]["name"] == trajectory.trajectory_id


def test_a_controller_that_goes_on_with_a_run_writes_a_trace_of_its_own(tmp_path):
    RunDirectory.create(tmp_path / "run", a_config(), overwrite=False).close()  # the process that looks after it
    for names in (["trace.json"], ["trace-2.json", "trace.json"]):
        run = RunDirectory.open(tmp_path / "run")
        run.record(EventBus(), HandClock())
        run.close()
        assert sorted(path.name for path in (tmp_path / "run").glob("trace*.json")) == names


def test_a_run_with_moves_gives_spans_that_never_overlap_on_a_track():
    config = experiment(
        repack__enabled=True, repack__interval_s=0.05, trainer__steps=8, rollout__max_response_tokens=2000
    )
    run, lines = Recorded(config, workload=_long_tailed(config)), []
    run.checks.append(lambda made: Trace(made.events, made.loop.time, lines.extend))
    run.to_the_end()
    depth, last = defaultdict(int), defaultdict(int)
    for line in lines:
        if line["ph"] not in "BE":
            continue
        track = line["pid"], line["tid"]
        assert line["ts"] >= last[track]
        depth[track] += 1 if line["ph"] == "B" else -1
        last[track] = line["ts"]
        assert depth[track] in (0, 1)
    assert [line for line in lines if line["ph"] == "s"]

from __future__ import annotations

import numpy as np
import pytest

from laminar.controller.state_clock import StateClock
from laminar.controller.step_metrics import StepMetrics
from laminar.observability.events import (
    EventBus,
    GroupDropped,
    RolloutsRepacked,
    StepFinished,
    StepStarted,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryMoved,
    TrajectoryOrphaned,
    TrajectoryStarted,
    WeightsBroadcast,
    WeightsPublished,
    WeightsPulled,
)
from laminar.observability.states import TRAINER_BUSY
from laminar.simulation.records.binned_mean import MAX_BINS, BinnedMean
from laminar.simulation.records.gpu_seconds import RecordedCluster, gpu_seconds
from laminar.simulation.records.record import Span
from laminar.simulation.records.recorder import RunRecorder
from laminar.simulation.records.rollout_activity import ActivitySeconds
from laminar.trajectory import Group, Prompt, Trajectory

PROMPT_TOKENS = 10


class Run:
    """A tiny run acted out by hand: one trainer, rollouts r0 and r1, the controller's own metrics between."""

    def __init__(self, *, steps=3, warm_up_steps=1, cool_down_steps=0, trainer_gpus=2, gpus=4, **recorder):
        self.time = 0.0
        self.events = EventBus()
        now = lambda: self.time  # noqa: E731
        self.trainer = StateClock("publishing", now)
        self.rollouts = {name: StateClock("weights", now) for name in ("r0", "r1")}
        self.metrics = StepMetrics(
            self.events,
            now=now,
            trainer_clock=self.trainer,
            rollout_clocks=lambda: self.rollouts,
            gauges=dict,
        )
        cluster = RecordedCluster(
            gpus=gpus,
            trainer_gpus=trainer_gpus,
            gpus_per_rollout=1,
            rollouts=("r0", "r1"),
            steps=steps,
            warm_up_steps=warm_up_steps,
            cool_down_steps=cool_down_steps,
        )
        self.recorder = RunRecorder(self.events, now, cluster, trainer_busy_s=self.trainer_busy_s, **recorder)
        self.groups = 0
        self.publish(0)
        for rollout in self.rollouts:
            self.pull(rollout, 0, 0.0)

    def trainer_busy_s(self):
        return sum(seconds for state, seconds in self.trainer.totals().items() if state in TRAINER_BUSY)

    def move(self, trajectories, source, target, seconds):
        for one in trajectories:
            one.rollout = target
            self.events.emit(TrajectoryMoved(trajectory=one, rollout=target))
        self.events.emit(
            RolloutsRepacked(source=source, target=target, trajectories=len(trajectories), tokens=1000, seconds=seconds)
        )

    def publish(self, version):
        self.events.emit(WeightsPublished(policy_version=version, publish_stall_s=0.5, nbytes=8))
        self.events.emit(
            WeightsBroadcast(
                policy_version=version,
                seconds=0.25,
                nbytes=8,
                received_bytes=8,
                relays=1,
                damaged=0,
                repairs=0,
                error="",
            )
        )

    def pull(self, rollout, version, seconds):
        self.rollouts[rollout].enter("pulling")
        self.time += seconds
        self.events.emit(WeightsPulled(rollout=rollout, policy_version=version, seconds=seconds))
        self.rollouts[rollout].enter("admission")

    def start(self, rollout, version, members=1):
        prompt = Prompt(
            prompt_id=0, source="", text="", token_ids=np.zeros(PROMPT_TOKENS, np.int32), answer="", metadata=""
        )
        group = Group(group_id=self.groups, prompt=prompt, trajectories=[], policy_version=version)
        self.groups += 1
        for k in range(members):
            one = Trajectory(trajectory_id=f"{group.group_id}.{k}", group_id=group.group_id, prompt=prompt)
            one.policy_version, one.rollout, one.started_at, one.reward = version, rollout, self.time, 1.0
            group.trajectories.append(one)
            self.rollouts[rollout].enter("generating")
            self.events.emit(TrajectoryStarted(trajectory=one))
        return group

    def finish(self, one, tokens, state="admission", last=False):
        one.num_tokens, one.finished_at = tokens, self.time
        self.events.emit(TrajectoryFinished(trajectory=one))
        if last:
            self.rollouts[one.rollout].enter(state)
        self.events.emit(TokensAppended(rollout=one.rollout, tokens=tokens, late_tokens=0, kv_utilization=0.0))

    def load(self, rollout, kv):
        self.events.emit(TokensAppended(rollout=rollout, tokens=0, late_tokens=0, kv_utilization=kv))

    def step(self, step, groups, seconds, version=None):
        self.trainer.enter("training")
        self.events.emit(StepStarted(step=step, groups=len(groups)))
        self.time += seconds
        self.publish(step)
        self.events.emit(
            StepFinished(step=step, policy_version=step, groups=groups, train_s=seconds, trainer_metrics={})
        )
        self.trainer.enter("trajectories")

    def record(self, **changes):
        arguments = {"engine": {"preemptions": 3.0}, "kv_utilization": None, "host_s": 0.5, "host_events": 100}
        return self.recorder.record(**(arguments | changes))


def synchronous_run(**arguments):
    """Per step: r0 generates 10 s, r1 20 s, then both wait 5 s for the trainer, and load weights for 1 s."""
    run = Run(**arguments)
    run.trainer.enter("trajectories")
    for step in (1, 2, 3):
        groups = [run.start("r0", step - 1), run.start("r1", step - 1)]
        run.load("r0", 0.8)
        run.load("r1", 0.4)
        run.time += 10
        run.finish(groups[0].trajectories[0], 100, last=True)
        run.time += 10
        run.finish(groups[1].trajectories[0], 200, last=True)
        run.step(step, groups, 5)
        for clock in run.rollouts.values():
            clock.enter("pulling")
        run.time += 1
        for rollout in run.rollouts:
            run.events.emit(WeightsPulled(rollout=rollout, policy_version=step, seconds=1.0))
    return run


def test_figures_are_of_the_measured_steps_alone():
    record = synchronous_run().record()
    assert [step.step for step in record.steps] == [1, 2, 3]
    assert record.steps[0].trained_tokens == 300 + 2 * PROMPT_TOKENS
    assert record.measured_s == pytest.approx(2 * 26)
    assert record.step_s == pytest.approx(26)
    assert record.trained_tokens_per_s == pytest.approx(320 / 26)
    assert record.generated_tokens_per_s == pytest.approx(300 / 26)
    assert record.staleness == {0: 4}
    assert (record.staleness_mean, record.staleness_max) == (0.0, 0)
    assert (record.trajectory_s.mean, record.trajectory_s.max) == (15.0, 20.0)
    assert record.response_tokens.p50 == 150.0
    assert record.weights.publish_stall_s == 0.5
    assert record.weights.broadcast_s == 0.25
    assert record.weights.pulls == 4
    assert record.engine == {"preemptions": 3.0}
    assert (record.host_s, record.host_events) == (0.5, 100)


def test_warm_up_and_cool_down_are_left_out():
    run = Run(steps=4, warm_up_steps=1, cool_down_steps=1)
    for step, seconds in ((1, 100), (2, 10), (3, 30), (4, 1000)):
        group = run.start("r0", max(0, step - 3))
        run.finish(group.trajectories[0], 50, last=True)
        run.step(step, [group], seconds)
    record = run.record()
    assert record.measured_s == pytest.approx(40)
    assert record.staleness == {1: 1, 2: 1}
    assert len(record.steps) == 4


def test_every_gpu_second_has_one_cause():
    record = synchronous_run().record()
    seconds = record.gpu_seconds
    assert sum(seconds.values()) == pytest.approx(4 * record.measured_s, abs=0.5)
    assert seconds["training"] == pytest.approx(2 * 2 * 5)
    assert seconds["generating"] == pytest.approx(2 * (10 + 20))
    assert seconds["batch"] == pytest.approx(2 * 10)  # r0 waits for r1
    assert seconds["trainer"] == pytest.approx(2 * 2 * 5)
    assert record.trainer_idle_fraction == pytest.approx(21 / 26, abs=1e-3)
    assert record.share("training") == pytest.approx(20 / 208, abs=1e-3)


def test_shared_gpus_are_not_counted_twice():
    record = synchronous_run(trainer_gpus=2, gpus=2).record()
    assert sum(record.gpu_seconds.values()) == pytest.approx(2 * record.measured_s, abs=0.5)
    assert "trainer" not in record.gpu_seconds
    assert "trajectories" not in record.gpu_seconds


def test_idle_time_after_a_publish_is_the_weights_not_the_trainers():
    run = Run(steps=2, warm_up_steps=0)
    first, second = run.start("r0", 0), run.start("r1", 0)
    run.time = 10.0
    run.finish(first.trajectories[0], 10, last=True)
    run.step(1, [first], 4)  # r0 idle for 4 s while the trainer trains
    run.rollouts["r0"].enter("weights")
    run.finish(second.trajectories[0], 10, state="weights", last=True)
    run.step(2, [second], 6)  # r0 waits for weights all the while
    record = run.record()
    assert record.gpu_seconds["trainer"] == pytest.approx(4)
    assert record.gpu_seconds["weights"] == pytest.approx(12)


def test_long_tail_is_generating_with_few_trajectories_left():
    run = Run(steps=2, warm_up_steps=1)
    group = run.start("r0", 0)
    run.finish(group.trajectories[0], 10, last=True)
    run.step(1, [group], 1)
    group = run.start("r0", 0, members=8)
    run.time += 10
    for one in group.trajectories[:6]:
        run.finish(one, 10)
    run.time += 7  # two of eight are a quarter: not yet
    run.finish(group.trajectories[6], 10)
    run.time += 5
    run.finish(group.trajectories[7], 10, last=True)
    run.step(2, [group], 1)
    seconds = run.record().gpu_seconds
    assert seconds["long_tail"] == pytest.approx(5)
    assert seconds["generating"] == pytest.approx(17)


def test_kv_utilization_is_the_mean_over_rollouts_and_time():
    record = synchronous_run().record()
    per_step = (0.8 * 10 + 0.4 * 20) / 2
    assert record.kv_utilization == pytest.approx(per_step / 26)
    bins = sum(record.kv_bins[:-1]) * record.kv_bin_s
    assert bins == pytest.approx(3 * per_step, rel=0.01)
    assert synchronous_run().record(kv_utilization=0.7).kv_utilization == 0.7


def test_timeline_shows_generating_pulling_and_the_trainer():
    record = synchronous_run(warm_up_steps=1, timeline_steps=1).record()
    trainer, r0, r1 = record.timeline
    assert [lane.name for lane in record.timeline] == ["trainer", "r0", "r1"]
    assert trainer.spans == [Span(start_s=21.0, end_s=26.0, activity="training", policy_version=2, running=2)]
    assert r0.spans == [
        Span(start_s=0.0, end_s=1.0, activity="pulling", policy_version=1, running=0),
        Span(start_s=1.0, end_s=11.0, activity="generating", policy_version=1, running=1),
        Span(start_s=11.0, end_s=26.0, activity="idle", policy_version=1, running=0),
    ]
    assert r1.spans[-1].end_s == 26.0


def test_timeline_has_at_most_the_wanted_rollouts_evenly_spread():
    events = EventBus()
    names = [f"rollout-{k}" for k in range(64)]
    cluster = RecordedCluster(
        gpus=65, trainer_gpus=1, gpus_per_rollout=1, rollouts=names, steps=1, warm_up_steps=0, cool_down_steps=0
    )
    recorder = RunRecorder(events, lambda: 0.0, cluster, trainer_busy_s=lambda: 0.0, timeline_rollouts=4)
    lanes = recorder._activity.end_timeline()
    assert [lane.name for lane in lanes] == ["trainer", "rollout-0", "rollout-16", "rollout-32", "rollout-48"]


def test_a_pull_in_the_middle_of_trajectories_starts_a_span_of_the_new_version():
    run = Run(steps=1, warm_up_steps=0)
    group = run.start("r0", 0)
    run.time = 10.0
    run.publish(1)
    run.pull("r0", 1, 2.0)
    run.time = 20.0
    run.finish(group.trajectories[0], 10, last=True)
    group.trajectories[0].versions = [(0, 0), (1, 5)]
    run.step(1, [group], 1)
    record = run.record()
    spans = [(span.start_s, span.end_s, span.activity, span.policy_version) for span in record.timeline[1].spans]
    assert spans[:3] == [(0.0, 10.0, "generating", 0), (10.0, 12.0, "pulling", 1), (12.0, 20.0, "generating", 1)]
    assert record.mixed_version_fraction == 1.0


def test_repacks_are_counted_in_the_measured_steps():
    run = Run(steps=2, warm_up_steps=1)
    group = run.start("r0", 0)
    run.move(group.trajectories, "r0", "r1", 9.0)  # in the warm-up: not counted
    run.finish(group.trajectories[0], 10, last=True)
    run.step(1, [group], 1)
    groups = [run.start("r0", 1), run.start("r0", 1), run.start("r0", 1)]
    run.time += 1
    run.move([groups[0].trajectories[0], groups[1].trajectories[0]], "r0", "r1", 0.6)
    run.time += 0.1
    run.move([groups[2].trajectories[0]], "r0", "r1", 0.7)  # of the same plan: it started with the other
    run.time += 9
    for one in groups:
        run.finish(one.trajectories[0], 10)
    run.step(2, groups, 1)
    record = run.record()
    repack = record.repack
    assert (repack.repacks, repack.moves, repack.trajectories_moved, repack.tokens_moved) == (1, 2, 3, 2000)
    assert repack.overhead_s == pytest.approx(0.65)
    last = [(span.activity, span.running) for span in record.timeline[2].spans]
    assert last == [("idle", 0), ("generating", 2), ("generating", 3), ("idle", 0)]


def test_orphans_are_on_no_rollout_until_they_go_on():
    run = Run(steps=1, warm_up_steps=0)
    group = run.start("r0", 0)
    one = group.trajectories[0]
    run.time += 5
    one.rollout = None
    run.events.emit(TrajectoryOrphaned(trajectory=one))
    run.time += 5
    one.rollout = "r1"
    run.events.emit(TrajectoryMoved(trajectory=one, rollout="r1"))
    run.time += 5
    run.finish(one, 10, last=True)
    run.step(1, [group], 1)
    lanes = run.record().timeline
    assert [(span.start_s, span.end_s) for span in lanes[1].spans if span.running] == [(0.0, 5.0)]
    assert [(span.start_s, span.end_s) for span in lanes[2].spans if span.running] == [(10.0, 15.0)]


def test_a_step_in_parts_does_not_count_the_waits_between_them_as_training():
    run = Run(steps=1, warm_up_steps=0)
    first, second = run.start("r0", 0), run.start("r1", 0)
    run.time += 10
    run.finish(first.trajectories[0], 10, last=True)
    run.trainer.enter("training")
    run.events.emit(StepStarted(step=1, groups=1))
    run.time += 2
    run.trainer.enter("trajectories")
    run.time += 8
    run.finish(second.trajectories[0], 10, last=True)
    run.step(1, [first, second], 3)
    record = run.record()
    spans = [(span.start_s, span.end_s, span.running) for span in record.timeline[0].spans]
    assert spans == [(10.0, 12.0, 1), (20.0, 23.0, 2)]
    assert record.gpu_seconds["trainer"] == pytest.approx(2 + 2 * 3)
    assert record.gpu_seconds["batch"] == pytest.approx(8)


def test_a_rollout_that_joins_later_is_counted_from_then_on():
    run = Run(steps=1, warm_up_steps=0)
    run.rollouts["r7"] = run.rollouts["r0"]
    group = run.start("r7", 0)
    run.finish(group.trajectories[0], 10, last=True)
    run.step(1, [group], 1)
    assert len(run.record().steps) == 1


def test_dropped_groups_leave_their_rollout():
    run = Run(steps=1, warm_up_steps=0)
    dropped, kept = run.start("r0", 0), run.start("r0", 0)
    run.events.emit(GroupDropped(group=dropped, reason="test"))
    run.finish(kept.trajectories[0], 10, last=True)
    run.step(1, [kept], 1)
    record = run.record()
    assert record.groups_dropped == 1
    assert record.timeline[1].spans[-1].activity == "idle"


def test_no_measured_step_is_an_error():
    with pytest.raises(RuntimeError, match="none of them measured"):
        Run().record()


def test_busy_states_of_shared_gpus_keep_other_idle_causes():
    cluster = RecordedCluster(
        gpus=2, trainer_gpus=2, gpus_per_rollout=2, rollouts=("r0",), steps=1, warm_up_steps=0, cool_down_steps=0
    )
    seconds = gpu_seconds(
        cluster,
        {"training": 4.0, "trajectories": 6.0, "mystery": 1.0},
        {"generating": 5.0, "admission": 5.0, "tools": 1.0},
        ActivitySeconds(long_tail=2.0, idle_while_training=4.0),
    )
    assert seconds == {"training": 8.0, "generating": 6.0, "long_tail": 4.0, "batch": 2.0, "tools": 2.0}


def test_bins_are_merged_and_keep_the_integral():
    level = BinnedMean(100.0)
    for k in range(5000):
        level.change(100.0 + k, 1.0 if k % 2 == 0 else -1.0)
    integral, seconds = level.take(5100.0)
    assert (integral, seconds) == (2500.0, 5000.0)
    assert len(level.means()) <= MAX_BINS
    assert level.width == 32.0
    assert level.means()[3] == 0.5
    assert level.take(5100.0) == (0.0, 0.0)

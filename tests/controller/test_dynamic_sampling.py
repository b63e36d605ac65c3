"""Dynamic sampling: which groups are refused, and that a run with it makes its steps, whatever the schedule."""

import asyncio

import numpy as np
import pytest

from laminar.config.algorithm_schema import DynamicSamplingConfig
from laminar.controller.dynamic_sampling import DynamicSampling
from laminar.observability import events as event_types
from laminar.protocol import messages
from laminar.simulation.channels.network import SimulatedNetwork
from laminar.simulation.clock.virtual_time import run_in_virtual_time
from laminar.trajectory import Group, Prompt, Trajectory
from tests.controller import fake_workers as fakes
from tests.controller.test_controller import Run
from tests.simulation.small_cluster import Recorded, experiment

PROMPT = Prompt(prompt_id=0, source="", text="", token_ids=np.ones(1, np.int32), answer="", metadata="")


def group(*rewards):
    members = [Trajectory(trajectory_id=str(k), group_id=0, prompt=PROMPT, reward=r) for k, r in enumerate(rewards)]
    return Group(group_id=0, prompt=PROMPT, trajectories=members)


def sampling(enabled=True, max_refills=1.0, groups_per_step=2):
    return DynamicSampling(
        DynamicSamplingConfig(enabled=enabled, max_refills=max_refills), groups_per_step=groups_per_step
    )


def test_groups_whose_rewards_are_all_equal_are_refused():
    judge = sampling(max_refills=10).judge
    assert judge(group(0.0, 0.0)) == judge(group(1.0, 1.0)) == judge(group(0.1)) == "refuse"
    assert judge(group(0.0, 1.0)) == judge(group(0.5, 0.5, 0.5000001)) == "keep"


def test_off_it_keeps_all():
    assert sampling(enabled=False).judge(group(1.0, 1.0)) == "keep"


def test_the_limit_is_said_once_and_counts_anew_after_a_step():
    one = sampling(max_refills=1.5)
    assert one.limit == 3
    verdicts = [one.judge(group(1.0, 1.0)) for _ in range(5)]
    assert verdicts == ["refuse", "refuse", "refuse", "limit reached", "keep"]
    assert one.judge(group(0.0, 1.0)) == "keep"
    one.step_made()
    assert one.judge(group(1.0, 1.0)) == "refuse"


class EveryThird(fakes.FakeEnvironment):
    """Only every third group has rewards that differ."""

    def score(self, message):
        group_id, _, member = message.trajectory_id.partition(".")
        reward = float(member == "0" and int(group_id) % 3 == 0)
        return messages.TrajectoryScored(trajectory_id=message.trajectory_id, reward=reward, response_text="", error="")


class AllEqual(fakes.FakeEnvironment):
    def score(self, message):
        return messages.TrajectoryScored(trajectory_id=message.trajectory_id, reward=1.0, response_text="", error="")


SCHEDULES = ("laminar", "synchronous", "one_step", "stream", "partial")


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_refused_groups_are_replaced_and_counted(tmp_path, schedule):
    config = fakes.experiment(
        algorithm__dynamic_sampling={"enabled": True}, schedule__name=schedule, trainer__mini_batches=2
    )
    run = await Run(config, tmp_path, environment=EveryThird).to_the_end()
    steps = run.of(event_types.StepFinished)
    assert [len(step.groups) for step in steps] == [2, 2, 2]
    assert all(group.group_id % 3 == 0 for step in steps for group in step.groups)
    dropped = run.of(event_types.GroupDropped)
    assert len(dropped) == run.controller.buffer.resampled >= 10
    assert all(event.resampled and "algorithm.dynamic_sampling" in event.reason for event in dropped)
    line = run.of(event_types.MetricsReported)[-1].line
    assert line["groups_resampled"] == len(dropped) and line["groups_dropped"] == 0
    assert line["reward_std"] == 0.5


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_at_the_limit_equal_groups_are_trained_and_a_notice_says_so(tmp_path, schedule):
    config = fakes.experiment(
        algorithm__dynamic_sampling={"enabled": True, "max_refills": 2},
        schedule__name=schedule,
        trainer__mini_batches=2,
    )
    run = await Run(config, tmp_path, environment=AllEqual).to_the_end()
    assert [len(step.groups) for step in run.of(event_types.StepFinished)] == [2, 2, 2]
    notices = [event.text for event in run.of(event_types.Notice) if "max_refills" in event.text]
    assert 1 <= len(notices) <= 3
    assert notices[0].startswith("4 groups since the last step had rewards that are all equal")
    assert 4 <= run.controller.buffer.resampled <= 12


@pytest.mark.parametrize("schedule", ["laminar", "synchronous", "one_step"])
@pytest.mark.parametrize(("environment", "trained"), [(EveryThird, 3), (AllEqual, 0)])
async def test_the_end_of_the_data_ends_the_run(tmp_path, schedule, environment, trained):
    class Environment(environment):
        lengths = (3,) * 7

    config = fakes.experiment(algorithm__dynamic_sampling={"enabled": True}, schedule__name=schedule, trainer__steps=50)
    run = await Run(config, tmp_path, environment=Environment).to_the_end()
    assert sum(len(step.groups) for step in run.of(event_types.StepFinished)) == trained
    assert run.controller.buffer.resampled == 7 - trained
    assert any("the data has ended" in event.text for event in run.of(event_types.Notice))


def test_refills_are_no_stall_for_the_trainer(tmp_path):
    """Each wave takes less than the limit, all of them together more: the trainer goes on waiting."""
    config = fakes.experiment(
        algorithm__dynamic_sampling={"enabled": True},
        controller__step_timeout_s=1,
        reward__calls_per_worker=1,
        rollout__replicas=1,
        rollout__max_running=4,
        trainer__steps=1,
    )

    class Late(EveryThird):
        async def answer(self, message):
            async for answer in super().answer(message):
                if isinstance(answer, messages.TrajectoryScored):
                    await asyncio.sleep(0.1)
                yield answer

    async def make():
        return await Run(config, tmp_path, SimulatedNetwork(latency=0.01), environment=Late).to_the_end()

    run = run_in_virtual_time(make(), limit_s=60)
    assert len(run.of(event_types.StepFinished)) == 1
    assert run.of(event_types.MetricsReported)[0].line["trainer_seconds"]["trajectories"] > 1


@pytest.mark.parametrize("schedule", ["laminar", "synchronous", "one_step"])
def test_in_a_simulated_cluster(schedule):
    config = experiment(algorithm__dynamic_sampling={"enabled": True}, schedule__name=schedule, trainer__steps=8)
    recorded = Recorded(config).to_the_end()
    steps = recorded.of(event_types.StepFinished)
    assert [len(step.groups) for step in steps] == [4] * 8
    for step in steps:
        assert all(len({member.reward for member in group.trajectories}) == 2 for group in step.groups)
    assert recorded.run.controller.buffer.resampled >= 8  # half of all groups of two

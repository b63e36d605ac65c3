"""Multi-turn trajectories through the whole controller, against workers that are not real."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from laminar.errors import RunFailed
from laminar.observability import events as event_types
from laminar.protocol import messages
from laminar.simulation.clock.virtual_time import run_in_virtual_time
from laminar.trajectory import TrajectoryState
from tests.controller import fake_workers as fakes
from tests.controller.test_controller import Run

OBSERVATION = (100, 101, 102)


def experiment(**overrides):
    settings = {
        "environment": {"name": "python_tool", "max_turns": 5},
        "rollout": {"replicas": 2, "max_running": 8, "max_response_tokens": 40},
    }
    return fakes.experiment(**{**settings, **overrides})


class Tool(fakes.FakeEnvironment):
    """Answers `calls` turns of a trajectory with an observation, and is done then."""

    calls = 2

    async def answer(self, message):
        if isinstance(message, messages.StepEnvironment):
            yield self.step(message)
        else:
            async for answer in super().answer(message):
                yield answer

    def step(self, message, **changes):
        done = len(message.turn_starts) > self.calls
        values = {
            "trajectory_id": message.trajectory_id,
            "lease": message.lease,
            "token_ids": np.array(() if done else OBSERVATION, np.int32),
            "reward": 0.25,
            "done": done,
            "error": "",
        }
        return messages.EnvironmentStepped(**{**values, **changes})


def turn_tokens(version):
    return [version, fakes.EOS]


async def test_turns_alternate_with_observations_until_the_environment_is_done(tmp_path):
    run = await Run(experiment(), tmp_path, environment=Tool).to_the_end()
    trained = [t for step in run.of(event_types.StepFinished) for group in step.groups for t in group.trajectories]
    assert len(trained) == 12
    for trajectory in trained:
        turn = turn_tokens(trajectory.policy_version)
        assert trajectory.response_token_ids().tolist() == [*turn, *OBSERVATION, *turn, *OBSERVATION, *turn]
        assert list(trajectory.observations()) == [(2, 5), (7, 10)]
        assert [(t.start, t.end, t.observation_end) for t in trajectory.turns] == [(0, 2, 5), (5, 7, 10), (10, 12, 12)]
        assert trajectory.finish_reason == "stop"
        assert trajectory.last_turn == (10, 12)
        assert trajectory.lease == 3
        member = int(trajectory.trajectory_id.rpartition(".")[2])
        assert trajectory.reward == pytest.approx(1.0 - member % 2 + 3 * 0.25)


async def test_observations_are_masked_for_the_trainer(tmp_path):
    run = await Run(experiment(), tmp_path, environment=Tool).to_the_end()
    for step in run.worker("trainer-0").steps:
        one = [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
        assert step.loss_mask.tolist() == one * 4
        assert step.engine_logprobs.tolist() == [-1.0 if bit else 0.0 for bit in one] * 4
        assert step.response_lengths.tolist() == [12] * 4


async def test_the_environment_is_given_every_turn_as_it_was_generated(tmp_path):
    run = await Run(experiment(), tmp_path, environment=Tool).to_the_end()
    steps = [m for m in run.worker("environment-0").received if isinstance(m, messages.StepEnvironment)]
    third = next(step for step in steps if len(step.turn_starts) == 3)
    assert third.turn_starts.tolist() == [0, 5, 10]
    assert third.turn_ends.tolist() == [2, 7, 12]
    assert len(third.token_ids) == 12
    scores = [m for m in run.worker("environment-0").received if isinstance(m, messages.ScoreTrajectory)]
    assert {(score.turn_start, score.turn_end) for score in scores} == {(10, 12)}


async def test_a_rollout_continues_from_all_tokens_and_draws_anew(tmp_path):
    seeds = {}

    class Rollout(fakes.FakeRollout):
        async def answer(self, message):
            if isinstance(message, messages.Generate):
                for one in message.assignments:
                    assert one.max_new_tokens == 40 - len(one.token_ids)
                    seeds.setdefault(one.trajectory_id, []).append(one.seed)
            async for answer in super().answer(message):
                yield answer

    await Run(experiment(), tmp_path, environment=Tool, rollout=Rollout).to_the_end()
    assert all(len(drawn) == 3 == len(set(drawn)) for drawn in seeds.values())


@pytest.mark.parametrize("name", ["laminar", "synchronous", "one_step", "stream", "partial"])
def test_every_schedule_makes_its_steps(tmp_path, name):
    class Slow(Tool):
        async def answer(self, message):
            if isinstance(message, messages.StepEnvironment):
                await asyncio.sleep(0.3)
            async for answer in super().answer(message):
                yield answer

    async def make():
        config = experiment(schedule={"name": name}, trainer__steps=6, reward={"function": "exact", "workers": 3})
        return await Run(config, tmp_path, environment=Slow).to_the_end()

    run = run_in_virtual_time(make(), limit_s=1000)
    assert [step.step for step in run.of(event_types.StepFinished)] == [1, 2, 3, 4, 5, 6]
    for step in run.of(event_types.StepFinished):
        for trajectory in (t for group in step.groups for t in group.trajectories):
            assert len(trajectory.turns) == 3
            assert name == "partial" or len(trajectory.versions) == 1
    line = run.of(event_types.MetricsReported)[-1].line
    assert line["turns_mean"] == 3 and line["environment_s_mean"] >= 0.9


def test_a_rollout_does_not_take_new_weights_while_its_trajectories_are_at_the_environment(tmp_path):
    class Slow(Tool):
        async def answer(self, message):
            if isinstance(message, messages.StepEnvironment) and message.trajectory_id == "0.0":
                await asyncio.sleep(2.0)
            async for answer in super().answer(message):
                yield answer

    async def make():
        config = experiment(trainer__steps=8, reward={"function": "exact", "workers": 4}, schedule={"max_staleness": 8})
        return await Run(config, tmp_path, environment=Slow).to_the_end()

    run = run_in_virtual_time(make(), limit_s=1000)
    for step in run.of(event_types.StepFinished):
        for trajectory in (t for group in step.groups for t in group.trajectories):
            assert len(trajectory.versions) == 1
    assert not run.of(event_types.TrajectoryOrphaned)
    lines = [event.line for event in run.of(event_types.MetricsReported)]
    assert any("environment" in line["rollout_seconds"] for line in lines)


# ---------------------------------------------------------------- ends


async def test_an_environment_that_never_ends_is_ended_after_max_turns(tmp_path):
    class Endless(Tool):
        calls = 10**9

    run = await Run(experiment(environment__max_turns=3), tmp_path, environment=Endless).to_the_end()
    trained = [t for step in run.of(event_types.StepFinished) for group in step.groups for t in group.trajectories]
    assert {(t.finish_reason, len(t.turns), t.num_tokens) for t in trained} == {("turns", 3, 12)}
    assert run.of(event_types.MetricsReported)[-1].line["finish_turns_fraction"] == 1.0


async def test_an_observation_that_leaves_no_room_ends_the_trajectory(tmp_path):
    config = experiment(rollout={"replicas": 2, "max_running": 8, "max_response_tokens": 10})
    run = await Run(config, tmp_path, environment=Tool).to_the_end()
    trained = [t for step in run.of(event_types.StepFinished) for group in step.groups for t in group.trajectories]
    assert {(t.finish_reason, len(t.turns), t.num_tokens, t.last_turn) for t in trained} == {("length", 2, 7, (5, 7))}


# ---------------------------------------------------------------- failures


class Failing(Tool):
    """Fails on one trajectory's second turn, `times` times."""

    times = 1

    def step(self, message, **changes):
        if message.trajectory_id == "0.1" and len(message.turn_starts) == 2 and Failing.times:
            Failing.times -= 1
            return super().step(message, error="the tool broke", reward=float("nan"))
        return super().step(message, **changes)


async def test_a_turn_that_fails_is_tried_again(tmp_path):
    Failing.times = 1
    run = await Run(experiment(), tmp_path, environment=Failing).to_the_end()
    assert not run.of(event_types.GroupDropped)
    assert Failing.times == 0


async def test_a_turn_that_fails_for_good_costs_its_group_only(tmp_path):
    Failing.times = 2
    run = await Run(experiment(), tmp_path, environment=Failing).to_the_end()
    (dropped,) = run.of(event_types.GroupDropped)
    assert dropped.group.group_id == 0
    assert "turn 2 of trajectory 0.1 was not answered: the tool broke" in dropped.reason
    assert [t.state for t in dropped.group.trajectories] == [TrajectoryState.EVICTED, TrajectoryState.FAILED]
    assert len(run.of(event_types.StepFinished)) == 3


async def test_a_turn_that_fails_for_good_stops_the_run_if_that_is_wanted(tmp_path):
    Failing.times = 2
    with pytest.raises(RunFailed, match="environment.on_error: drop"):
        await Run(experiment(environment__on_error="fail"), tmp_path, environment=Failing).to_the_end()


async def test_an_environment_that_fails_on_every_turn_ends_the_run(tmp_path):
    class Broken(Tool):
        def step(self, message, **changes):
            return super().step(message, error="ConnectionError: no server")

    with pytest.raises(RunFailed, match="ConnectionError: no server. 8 groups in a row had to be dropped"):
        await Run(experiment(), tmp_path, environment=Broken).to_the_end()


class CannotBegin(Tool):
    """With these prompts."""

    bad = ()

    async def answer(self, message):
        async for answer in super().answer(message):
            if isinstance(answer, messages.PromptsFetched):
                prompts = [replace(p, error="no number" if p.prompt_id in self.bad else "") for p in answer.prompts]
                answer = replace(answer, prompts=tuple(prompts))
            yield answer


async def test_a_prompt_with_which_the_environment_cannot_begin_is_left_out_counted_and_named(tmp_path):
    class Some(CannotBegin):
        bad = (0, 2, 3)

    run = await Run(experiment(), tmp_path, environment=Some).to_the_end()
    assert [(e.prompt_id, e.reason) for e in run.of(event_types.PromptRejected)] == [(k, "no number") for k in Some.bad]
    trained = {g.prompt.prompt_id for step in run.of(event_types.StepFinished) for g in step.groups}
    assert len(trained) == 6 and not trained & set(Some.bad)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ((3,) * 1000, "prompt 7: no number. So it was with 8 prompts in a row"),
        ((3,) * 5, "none of the 5 prompts can be used: prompt 4: no number"),
    ],
)
async def test_an_environment_that_can_begin_with_nothing_ends_the_run(tmp_path, lengths, said):
    class All(CannotBegin):
        bad = range(1000)

    All.lengths = lengths
    with pytest.raises(RunFailed, match=said):
        await Run(experiment(), tmp_path, environment=All).to_the_end()


def test_a_worker_that_does_not_answer_a_turn_is_replaced_and_the_turn_goes_to_another(tmp_path):
    class Hangs(Tool):
        async def answer(self, message):
            if isinstance(message, messages.StepEnvironment) and self.pid == 1 and message.trajectory_id == "1.0":
                await asyncio.sleep(1e6)
            async for answer in super().answer(message):
                yield answer

    async def make():
        # Workers that are not real send no heartbeats: silence must not tell.
        patient = {"max_running": 8, "max_response_tokens": 40, "suspect_after_s": 50, "silence_limit_s": 100}
        config = experiment(environment__step_timeout_s=4.0, rollout=patient, controller__step_timeout_s=60)
        run = Run(config, tmp_path, environment=Hangs)
        run.successor = Hangs
        return await run.to_the_end()

    run = run_in_virtual_time(make(), limit_s=1000)
    assert run.of(event_types.WorkerReplaced)
    assert not run.of(event_types.GroupDropped)
    assert len(run.of(event_types.StepFinished)) == 3


def test_a_lost_rollout_does_not_lose_trajectories_that_are_at_the_environment(tmp_path):
    class Slow(Tool):
        async def answer(self, message):
            if isinstance(message, messages.StepEnvironment) and message.trajectory_id.startswith("0."):
                await asyncio.sleep(1.0)
                if len(message.turn_starts) == 2:
                    run.controller.registry.lost("rollout-0", "killed")
            async for answer in super().answer(message):
                yield answer

    async def make():
        nonlocal run
        config = experiment(rollout={"replicas": 2, "max_running": 8, "max_response_tokens": 40, "restarts": 0})
        run = Run(config, tmp_path, environment=Slow)
        return await run.to_the_end()

    run = None
    run_in_virtual_time(make(), limit_s=1000)
    (step,) = [s for s in run.of(event_types.StepFinished) if any(g.group_id == 0 for g in s.groups)]
    group = next(group for group in step.groups if group.group_id == 0)
    assert all(len(t.turns) == 3 and t.rollout == "rollout-1" for t in group.trajectories)
    assert not run.of(event_types.TrajectoryRestarted)

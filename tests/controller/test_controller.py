"""The whole controller against workers that are not real (fake_workers.py), on channels in memory (`simulation/channels/`)."""

import asyncio
import json

import numpy as np
import pytest

from laminar.controller.controller import Controller
from laminar.errors import RunFailed, UserError, WorkerLost
from laminar.launch.commands import expected_workers
from laminar.observability import events as event_types
from laminar.observability.events import EventBus
from laminar.observability.run_directory import RunDirectory
from laminar.protocol import messages
from laminar.simulation.channels.network import SimulatedNetwork
from laminar.simulation.clock.virtual_time import run_in_virtual_time
from tests.controller import fake_workers as fakes


class Run:
    """A controller, its fake workers, and every event that there was."""

    def __init__(self, config, tmp_path, network=None, **kinds):
        self.network = network or SimulatedNetwork(through_codec=True)
        self.events = []
        self.bus = bus = EventBus()
        bus.subscribe(self.events.append)
        self.controller = Controller(
            config,
            self.network.controller,
            bus,
            run_id="r",
            run_dir=tmp_path,
            expected_workers=expected_workers(config),
            restart=self.restart,
        )
        self.workers = fakes.make_workers(self.network, config, **kinds)
        self.successor = None  # kind of environment worker that takes a lost one's place
        self._tasks = []

    async def restart(self, name, reason):
        """As the launcher does: another process with the same index."""
        if self.successor is None:
            raise WorkerLost(reason)
        kind, _, index = name.rpartition("-")
        worker = self.successor(self.network, kind, int(index), pid=2)
        self.workers.append(worker)
        self._tasks.append(asyncio.create_task(worker.run()))

    async def launch(self):
        self._tasks.append(asyncio.create_task(fakes.run_workers(self.workers)))

    async def to_the_end(self):
        async with asyncio.timeout(20):
            try:
                await self.controller.run(self.launch)
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        return self

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def worker(self, name):
        return next(worker for worker in self.workers if worker.name == name)


def test_a_run_makes_its_steps_and_consumes_each_group_once(tmp_path):
    async def make():
        return await Run(fakes.experiment(), tmp_path, SimulatedNetwork(latency=0.01)).to_the_end()

    run = run_in_virtual_time(make(), limit_s=60)
    steps = run.of(event_types.StepFinished)
    assert [step.step for step in steps] == [1, 2, 3]
    assert [step.policy_version for step in steps] == [1, 2, 3]
    trained = [group.group_id for step in steps for group in step.groups]
    assert sorted(trained) == [0, 1, 2, 3, 4, 5]
    assert len(run.of(event_types.TrajectoryStarted)) == 12  # no more than the steps need
    lines = [event.line for event in run.of(event_types.MetricsReported)]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["reward_mean"] == 0.5 and line["loss"] == 0.5 for line in lines)
    assert all(line["each_rollout_seconds"].keys() == {"rollout-0", "rollout-1"} for line in lines)
    for line in lines:
        assert line["step_s"] >= 0.02 - 1e-9  # a question and an answer at least
        assert sum(line["trainer_seconds"].values()) == pytest.approx(line["step_s"], abs=2e-4)  # rounded to that
        for seconds in line["each_rollout_seconds"].values():
            assert sum(seconds.values()) == pytest.approx(line["step_s"], abs=4e-4)
    assert [event.path for event in run.of(event_types.CheckpointFinished)] == [
        str(tmp_path / "checkpoints" / "step-000003")
    ]


async def test_every_trajectory_is_of_one_version_and_within_the_staleness_bound(tmp_path):
    config = fakes.experiment(trainer__steps=8, schedule__max_staleness=1)
    run = await Run(config, tmp_path).to_the_end()
    for step in run.of(event_types.StepFinished):
        for group in step.groups:
            for trajectory in group.trajectories:
                assert trajectory.response_token_ids().tolist() == [trajectory.policy_version, fakes.EOS]
                assert 0 <= step.policy_version - 1 - trajectory.policy_version <= 1
                assert trajectory.step == step.step


async def test_the_trainer_gets_whole_groups_as_flat_arrays(tmp_path):
    run = await Run(fakes.experiment(trainer__ranks=2), tmp_path).to_the_end()
    first, second = run.worker("trainer-0"), run.worker("trainer-1")
    assert len(first.steps) == len(second.steps) == 3
    step = first.steps[0]
    np.testing.assert_array_equal(step.token_ids, second.steps[0].token_ids)
    assert step.group_ids.tolist() == [step.group_ids[0]] * 2 + [step.group_ids[2]] * 2
    assert step.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert step.prompt_lengths.tolist() == [3] * 4
    assert step.response_lengths.tolist() == [2] * 4
    assert len(step.token_ids) == 4 * 5
    assert len(step.engine_logprobs) == len(step.loss_mask) == 8


async def test_a_rollout_pulls_on_its_own_while_another_is_held_by_a_straggler(tmp_path):
    """Trajectory-level asynchrony: rollout-0 never finishes one trajectory, and the others train and pull on."""

    class Held(fakes.FakeRollout):
        async def answer(self, message):
            if self.index == 0 and isinstance(message, messages.Generate):
                self.hold = self.hold or frozenset({message.assignments[0].trajectory_id})
            async for answer in super().answer(message):
                yield answer

    config = fakes.experiment(trainer__steps=5, schedule__max_staleness=5, trainer__groups_per_step=1)
    run = Run(config, tmp_path, rollout=Held)
    seen = []
    stepped = asyncio.Event()

    def on_step(event):
        seen.append(event.step)
        if event.step == 4:  # the fifth needs the held group
            stepped.set()

    run.controller.events.subscribe(on_step, event_types.StepFinished)
    task = asyncio.create_task(run.to_the_end())
    await asyncio.wait_for(stepped.wait(), 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    pulls = {(event.rollout, event.policy_version) for event in run.of(event_types.WeightsPulled)}
    assert ("rollout-1", 3) in pulls
    assert {version for name, version in pulls if name == "rollout-0"} == {0}
    assert seen == [1, 2, 3, 4]


async def test_too_long_prompts_are_rejected_counted_and_the_run_goes_on(tmp_path):
    class Environment(fakes.FakeEnvironment):
        lengths = (3, 99, 0, *(3,) * 100)

    run = await Run(fakes.experiment(), tmp_path, environment=Environment).to_the_end()
    rejected = run.of(event_types.PromptRejected)
    assert [event.prompt_id for event in rejected] == [1, 2]
    assert rejected[0].reason == "99 tokens, data.max_prompt_tokens is 8"
    assert run.controller.prompts.rejected == 2
    assert len(run.of(event_types.StepFinished)) == 3
    assert sum(event.line["prompts_rejected"] for event in run.of(event_types.MetricsReported)[-1:]) == 2


async def test_a_data_set_of_too_long_prompts_only_is_refused(tmp_path):
    class Environment(fakes.FakeEnvironment):
        lengths = (99, 99)

    with pytest.raises(UserError, match="data.max_prompt_tokens: all 2 prompts are longer than 8 tokens"):
        await Run(fakes.experiment(), tmp_path, environment=Environment).to_the_end()


@pytest.mark.parametrize(("last_batch", "steps"), [("train", [2, 2, 1]), ("drop", [2, 2])])
async def test_the_end_of_the_data_ends_the_run(tmp_path, last_batch, steps):
    class Environment(fakes.FakeEnvironment):
        lengths = (3,) * 5

    config = fakes.experiment(trainer__steps=50, data__last_batch=last_batch)
    run = await Run(config, tmp_path, environment=Environment).to_the_end()
    assert [len(event.groups) for event in run.of(event_types.StepFinished)] == steps
    dropped = run.of(event_types.GroupDropped)
    assert len(dropped) == 5 - sum(steps)
    assert all("data.last_batch: drop" in event.reason for event in dropped)
    assert len(run.of(event_types.CheckpointFinished)) == 1


class NanReward(fakes.FakeEnvironment):
    def score(self, message):
        nan = message.trajectory_id == "1.1"
        return messages.TrajectoryScored(
            trajectory_id=message.trajectory_id,
            reward=float("nan") if nan else 1.0,
            response_text="",
            error="the reward of trajectory 1.1 is nan" if nan else "",
        )


async def test_a_nan_reward_stops_the_run_and_names_the_trajectory(tmp_path):
    with pytest.raises(RunFailed, match="the reward of trajectory 1.1 is nan.*reward.on_invalid: drop"):
        await Run(fakes.experiment(reward__on_invalid="fail"), tmp_path, environment=NanReward).to_the_end()


async def test_a_nan_reward_drops_its_group(tmp_path):
    run = await Run(fakes.experiment(), tmp_path, environment=NanReward).to_the_end()
    trained = [group.group_id for step in run.of(event_types.StepFinished) for group in step.groups]
    assert 1 not in trained
    assert len(trained) == 6
    assert [event.group.group_id for event in run.of(event_types.GroupDropped)] == [1]
    assert run.controller.buffer.dropped == 1
    assert run.of(event_types.MetricsReported)[-1].line["rewards_invalid"] == 1


async def test_a_nan_reward_counts_as_0_if_asked_to(tmp_path):
    config = fakes.experiment(reward__on_invalid="zero")
    run = Run(config, tmp_path, environment=NanReward)
    directory = RunDirectory.create(tmp_path / "run", config, overwrite=False)
    directory.record(run.bus, lambda: 0.0)
    await run.to_the_end()
    directory.close()
    assert run.of(event_types.GroupDropped) == []
    lines = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines if line["reward"] != 1.0] == ["1.1"]
    (line,) = (line for line in lines if line["reward_error"] is not None)
    assert (line["id"], line["reward"], line["dropped"]) == ("1.1", 0.0, None)
    assert line["reward_error"] == "the reward of trajectory 1.1 is nan"
    assert run.of(event_types.MetricsReported)[-1].line["rewards_invalid"] == 1
    warnings = [event.text for event in run.of(event_types.Notice) if event.level == "warning"]
    assert warnings == ["1 of 2 rewards of group 1 count as 0: the reward of trajectory 1.1 is nan"]


@pytest.mark.parametrize("on_invalid, dropped", [("drop", 7), ("zero", 0)])
async def test_rewards_that_all_fail_stop_the_run(tmp_path, on_invalid, dropped):
    class Broken(fakes.FakeEnvironment):
        def score(self, message):
            error = f"trajectory {message.trajectory_id}: reward mine:reward raised KeyError: 'words'"
            return messages.TrajectoryScored(
                trajectory_id=message.trajectory_id, reward=float("nan"), response_text="", error=error
            )

    config = fakes.experiment(trainer__steps=100, reward__on_invalid=on_invalid)
    run = Run(config, tmp_path, environment=Broken)
    with pytest.raises(RunFailed, match="reward mine:reward raised KeyError.*8 groups in a row had no valid reward"):
        await run.to_the_end()
    assert len(run.of(event_types.GroupDropped)) == dropped


async def test_the_parts_of_a_reward_are_in_the_metrics(tmp_path):
    class Parts(fakes.FakeEnvironment):
        def score(self, message):
            group, _, member = message.trajectory_id.partition(".")
            parts = {"right": float(member)} | ({"format": 0.25} if group == "0" else {})
            return messages.TrajectoryScored(
                trajectory_id=message.trajectory_id, reward=1.0, response_text="", error="", parts=parts
            )

    run = await Run(fakes.experiment(), tmp_path, environment=Parts).to_the_end()
    lines = [event.line["reward_parts"] for event in run.of(event_types.MetricsReported)]
    assert lines == [{"right": 0.5, "format": 0.25}, {"right": 0.5}, {"right": 0.5}]


async def test_stop_ends_after_the_current_step_with_a_checkpoint(tmp_path):
    run = Run(fakes.experiment(trainer__steps=1000), tmp_path)
    run.controller.events.subscribe(
        lambda event: run.controller.control.stop() if event.step == 2 else None, event_types.StepFinished
    )
    await run.to_the_end()
    assert run.controller.trainer.step == 2
    assert [event.step for event in run.of(event_types.CheckpointFinished)] == [2]


async def test_pause_holds_generation_and_resume_lets_it_go_on(tmp_path):
    run = Run(fakes.experiment(trainer__steps=6), tmp_path)
    control = run.controller.control
    paused_at = []

    def on_step(event):
        if event.step == 2:
            control.pause(generation=True, training=True)
            paused_at.append(len(run.of(event_types.StepStarted)))
            asyncio.get_running_loop().call_later(0.2, resume)

    def resume():
        paused_at.append(len(run.of(event_types.StepStarted)))
        control.resume(generation=True, training=True)

    run.controller.events.subscribe(on_step, event_types.StepFinished)
    await run.to_the_end()
    assert paused_at == [2, 2]
    assert run.controller.trainer.step == 6


async def test_a_wait_that_is_too_long_says_what_it_waits_for(tmp_path):
    class Silent(fakes.FakeRollout):
        async def answer(self, message):
            if isinstance(message, messages.PullWeights):
                async for answer in super().answer(message):
                    yield answer

    config = fakes.experiment(controller__step_timeout_s=0.3)
    with pytest.raises(RunFailed, match="trajectories and has sent no token|batch of step 1.*groups ready"):
        await Run(config, tmp_path, rollout=Silent).to_the_end()


async def test_a_worker_that_never_comes_is_named(tmp_path):
    run = Run(fakes.experiment(controller__start_timeout_s=0.3), tmp_path)
    run.workers = [worker for worker in run.workers if worker.name != "rollout-1"]
    with pytest.raises(RunFailed, match=r"not ready after 0.3 s: rollout-1 \(not connected\)"):
        await run.to_the_end()


async def test_a_failed_final_checkpoint_fails_the_run_with_its_reason(tmp_path):
    class Full(fakes.FakeTrainer):
        async def answer(self, message):
            if isinstance(message, messages.SaveCheckpoint):
                yield messages.CheckpointSaved(
                    step=message.step, path=message.path, seconds=0.0, nbytes=0, error="no space left"
                )
                return
            async for answer in super().answer(message):
                yield answer

    run = Run(fakes.experiment(), tmp_path, trainer=Full)
    with pytest.raises(RunFailed, match="final checkpoint could not be written: no space left"):
        await run.to_the_end()
    assert len(run.of(event_types.StepFinished)) == 3


async def test_a_failed_periodic_checkpoint_is_told_and_the_run_goes_on(tmp_path):
    class FullOnce(fakes.FakeTrainer):
        async def answer(self, message):
            if isinstance(message, messages.SaveCheckpoint) and message.step == 1:
                yield messages.CheckpointSaved(
                    step=message.step, path=message.path, seconds=0.0, nbytes=0, error="no space left"
                )
                return
            async for answer in super().answer(message):
                yield answer

    run = await Run(fakes.experiment(trainer__checkpoint_every=1), tmp_path, trainer=FullOnce).to_the_end()
    assert [event.error for event in run.of(event_types.CheckpointFinished)] == ["no space left", "", ""]
    assert any("checkpoint of step 1 failed: no space left" in event.text for event in run.of(event_types.Notice))


async def test_a_failed_broadcast_is_told_and_training_goes_on(tmp_path):
    run = Run(fakes.experiment(), tmp_path)
    relay = run.worker("relay-1")

    async def answer(message):
        if isinstance(message, messages.Carry) and message.policy_version == 1:
            yield messages.CarryFailed(policy_version=1, order=message.order, error="no room for it")
            return
        async for reply in fakes.FakeRelay.answer(relay, message):
            yield reply

    relay.answer = answer
    await run.to_the_end()
    assert len(run.of(event_types.StepFinished)) == 3
    assert any(
        "version 1 is not everywhere: relay-1: no room for it; going on without" in event.text
        for event in run.of(event_types.Notice)
    )


async def test_a_worker_of_another_version_or_run_is_turned_away(tmp_path):
    run = Run(fakes.experiment(), tmp_path)
    stranger = fakes.FakeWorker(run.network, "environment", 7)
    run.workers.append(stranger)
    await run.to_the_end()
    assert any("no environment-7" in event.text for event in run.of(event_types.Notice))
    assert len(run.of(event_types.StepFinished)) == 3


async def test_a_crash_in_a_handler_ends_the_run_with_that_error(tmp_path):
    run = Run(fakes.experiment(), tmp_path)

    def broken(event):
        raise ZeroDivisionError("a subscriber's bug")

    run.controller.events.subscribe(broken, event_types.GroupCompleted)
    with pytest.raises(ZeroDivisionError, match="a subscriber's bug"):
        await run.to_the_end()


class Hanging(fakes.FakeEnvironment):
    """User code that never returns for one trajectory."""

    async def answer(self, message):
        if isinstance(message, messages.ScoreTrajectory) and message.trajectory_id == "1.1":
            return
        async for answer in super().answer(message):
            yield answer


def hanging_run(tmp_path, **keys):
    """Fake workers send no heartbeats: none are to be missed meanwhile."""
    config = fakes.experiment(reward__timeout_s=1.0, rollout__suspect_after_s=100.0, **keys)

    async def make():
        run = Run(config, tmp_path, SimulatedNetwork(latency=0.01), environment=Hanging)
        run.successor = fakes.FakeEnvironment
        return await run.to_the_end()

    return run_in_virtual_time(make(), limit_s=60)


def test_a_reward_that_hangs_costs_its_group_and_its_worker_is_replaced(tmp_path):
    run = hanging_run(tmp_path)
    dropped = run.of(event_types.GroupDropped)
    assert [event.group.group_id for event in dropped] == [1]
    assert "no reward for trajectory 1.1: waited 6 s for TrajectoryScored" in dropped[0].reason
    assert "reward.timeout_s" in dropped[0].reason
    assert [event.worker for event in run.of(event_types.WorkerReplaced)] == ["environment-0"]
    assert len(run.of(event_types.StepFinished)) == 3


def test_a_reward_that_hangs_counts_as_0_if_asked_to(tmp_path):
    run = hanging_run(tmp_path, reward__on_invalid="zero")
    assert run.of(event_types.GroupDropped) == []
    trained = [t for event in run.of(event_types.StepFinished) for group in event.groups for t in group.trajectories]
    (hung,) = (trajectory for trajectory in trained if trajectory.reward_error)
    assert (hung.trajectory_id, hung.reward) == ("1.1", 0.0)
    assert "no reward for trajectory 1.1: waited 6 s for TrajectoryScored" in hung.reward_error
    assert len(run.of(event_types.StepFinished)) == 3


def test_a_reward_that_hangs_stops_the_run_if_asked_to(tmp_path):
    with pytest.raises(RunFailed, match="no reward for trajectory 1.1"):
        hanging_run(tmp_path, reward__on_invalid="fail")


async def test_the_call_of_an_environment_worker_that_dies_is_made_again(tmp_path):
    run = None

    class Dying(fakes.FakeEnvironment):
        async def answer(self, message):
            if isinstance(message, messages.ScoreTrajectory):
                run.controller.registry.lost(self.name, "its process ended (signal SIGSEGV)")
                return
            async for answer in super().answer(message):
                yield answer

    run = Run(fakes.experiment(), tmp_path, environment=Dying)
    run.successor = fakes.FakeEnvironment
    await run.to_the_end()
    assert [event.worker for event in run.of(event_types.WorkerReplaced)] == ["environment-0"]
    assert len(run.of(event_types.StepFinished)) == 3
    assert run.of(event_types.GroupDropped) == []

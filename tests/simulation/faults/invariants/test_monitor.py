"""Every invariant can fail: a controller with one fault of its own is caught, and by the invariant that is meant to."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from laminar.controller.controller import Controller
from laminar.controller.evaluation import Evaluation
from laminar.controller.evaluator import Evaluator
from laminar.controller.experience_buffer import ExperienceBuffer
from laminar.controller.kv_exports import KvExports
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.prompt_pool import PromptPool
from laminar.controller.relay_manager import Relay, RelayManager
from laminar.controller.rollout_driver import RolloutDriver
from laminar.controller.rollout_fleet import RolloutFleet
from laminar.controller.rollout_manager import RolloutManager
from laminar.controller.schedules.bounded import BoundedSchedule
from laminar.controller.schedules.laminar import LaminarSchedule
from laminar.controller.trainer_driver import TrainerDriver
from laminar.controller.worker_registry import WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.protocol.messages import Shutdown
from laminar.simulation.faults.fault import Drain, Duplicates, Remove, SpotNotice
from tests.simulation.faults.mutants import first_violation, with_rollout_faults, with_trainer_faults

ONCE = "each prompt ends exactly once"
TRAINED = "no group is trained twice, none beyond max_staleness"
TOKENS = "no trajectory mixes versions, no token is lost or doubled"
GROWS = "policy_version only grows"
FENCE = "leases fence late messages"
PLACE = "a trajectory in progress is in one place"
HEALTHY = "only healthy rollouts are given work"
KV = "exported KV goes with its trajectory"
SERVES = "a rollout serves only what it has loaded"
COUNTS = "counts add up"
CAUSE = "a worker is lost only for a cause"
FURTHER = "nothing waits without limit"
ENDS = "the run ends as it should"
APART = "evaluation stays apart from training and is of one version"


def with_evaluation(schedule):
    return schedule.config.evaluation is not None


def test_an_evaluation_that_takes_more_than_its_share_is_noticed(monkeypatch):
    places = Evaluator._places
    monkeypatch.setattr(Evaluator, "_places", lambda self: 2 * places(self))
    assert first_violation(range(100), wanted=with_evaluation).violated == APART


def test_an_evaluation_by_several_versions_is_noticed(monkeypatch):
    monkeypatch.setattr(Evaluator, "claim", lambda self, replica: True)
    monkeypatch.setattr(Evaluator, "_start_over", lambda self, evaluation: None)
    # By the pool or by the figures, which refuse it and end the run; else by the invariant.
    assert first_violation(range(100), wanted=with_evaluation).violated in (APART, ENDS)


def test_an_evaluation_that_counts_as_training_is_noticed(monkeypatch):
    make = Evaluation._make

    def forgetful(self, number):
        make(self, number)
        for trajectory in self.trajectories:
            trajectory.evaluation = None

    monkeypatch.setattr(Evaluation, "_make", forgetful)
    assert first_violation(range(100), wanted=with_evaluation) is not None


def test_deltas_under_old_leases_are_noticed(monkeypatch):
    take_in = PartialResponsePool.take_in

    def gullible(self, message, now):
        trajectories = [self.get(trajectory_id) for trajectory_id in message.trajectory_ids]
        if all(one is not None and one.versions[-1][0] == message.policy_version for one in trajectories):
            starts = np.array([one.num_tokens for one in trajectories], np.int32)
            message = replace(message, leases=tuple(one.lease for one in trajectories), starts=starts)
        return take_in(self, message, now)

    monkeypatch.setattr(PartialResponsePool, "take_in", gullible)
    run = first_violation(
        range(200), wanted=lambda schedule: any(isinstance(fault, Duplicates) for fault in schedule.faults)
    )
    assert run.violated == FENCE


def test_a_trajectory_that_goes_on_with_another_version_is_noticed(monkeypatch):
    make = PartialResponsePool.__init__
    monkeypatch.setattr(PartialResponsePool, "__init__", lambda self, **_: make(self, mixes_versions=True))
    run = first_violation(
        range(300),
        wanted=lambda schedule: with_rollout_faults(schedule) and schedule.config.schedule.name == "laminar",
    )
    assert run.violated == TOKENS
    assert "mixes versions" in run.report


def test_a_lost_token_is_noticed(monkeypatch):
    take_in = PartialResponsePool.take_in

    def forgetful(self, message, now):
        short = message.token_counts[0] > 1 and message.starts[0] == 0 and message.trajectory_ids[0] == "2.1"
        if short:
            counts = message.token_counts.copy()
            counts[0] -= 1
            message = replace(
                message, token_counts=counts, token_ids=message.token_ids[1:], logprobs=message.logprobs[1:]
            )
        return take_in(self, message, now)

    monkeypatch.setattr(PartialResponsePool, "take_in", forgetful)
    assert first_violation(range(10)) is not None  # a later delta does not fit on, or the response is short


def test_groups_that_go_back_though_their_step_is_safe_are_trained_twice(monkeypatch):
    async def forgets_to_clear(self):
        await self.checkpoints.save(self._orders, self._ranks, step=self.step, policy_version=self.policy_version)

    monkeypatch.setattr(TrainerDriver, "_checkpoint", forgets_to_clear)
    run = first_violation(range(400), wanted=with_trainer_faults)
    assert run.violated in (TRAINED, COUNTS, ONCE)


def test_groups_that_are_lost_with_their_step_are_noticed(monkeypatch):
    monkeypatch.setattr(ExperienceBuffer, "give_back", lambda self, groups: None)
    run = first_violation(range(400), wanted=with_trainer_faults)
    assert run.violated in (ONCE, COUNTS, TRAINED)


def test_a_prompt_that_is_taken_twice_is_noticed(monkeypatch):
    take = PromptPool.take

    def twice(self):
        prompt = take(self)
        if prompt is not None and prompt.prompt_id == 3:
            self._prompts.appendleft(prompt)
        return prompt

    monkeypatch.setattr(PromptPool, "take", twice)
    run = first_violation(range(10))
    assert run.violated == ONCE and "prompt 3 is taken again" in run.report


def test_a_prompt_that_vanishes_is_noticed_when_the_data_ends(monkeypatch):
    take = PromptPool.take

    def forgetful(self):
        prompt = take(self)
        return take(self) if prompt is not None and prompt.prompt_id == 1 else prompt

    monkeypatch.setattr(PromptPool, "take", forgetful)
    run = first_violation(range(60), wanted=lambda schedule: schedule.workload.prompts is not None)
    assert run.violated == ENDS and "prompts [1] have not ended" in run.report


def test_admission_without_a_bound_is_noticed(monkeypatch):
    monkeypatch.setattr(BoundedSchedule, "room", lambda self, **_: 1000)
    monkeypatch.setattr(LaminarSchedule, "_obligations", lambda *_: [])
    run = first_violation(
        range(60),
        wanted=lambda schedule: (
            schedule.config.schedule.name == "laminar" and schedule.config.schedule.max_staleness in (0, 1)
        ),
    )
    assert run.violated == TRAINED and "schedule.max_staleness" in run.report


def test_a_version_that_is_used_twice_is_noticed(monkeypatch):
    start_anew = TrainerDriver._start_anew

    async def reusing(self, reason):
        self._orders.issued = self.policy_version - 1
        await start_anew(self, reason)

    monkeypatch.setattr(TrainerDriver, "_start_anew", reusing)
    run = first_violation(range(400), wanted=with_trainer_faults)
    assert run.violated == GROWS


def test_work_for_a_version_that_is_not_loaded_is_noticed(monkeypatch):
    pulled = RolloutManager.pulled
    monkeypatch.setattr(
        RolloutManager, "pulled", lambda self, replica, version: pulled(self, replica, version + (version == 1))
    )
    run = first_violation(range(10))
    assert run.violated == SERVES


def test_an_orphan_that_is_forgotten_is_noticed(monkeypatch):
    orphan = PartialResponsePool.orphan

    def losing(self, trajectory):
        orphan(self, trajectory)
        del self.orphans[trajectory.trajectory_id]

    monkeypatch.setattr(PartialResponsePool, "orphan", losing)
    run = first_violation(range(100), wanted=with_rollout_faults)
    assert run.violated == PLACE and "in no place" in run.report


def test_an_orphan_that_nobody_goes_on_with_is_noticed(monkeypatch):
    monkeypatch.setattr(PartialResponsePool, "_may_go_on", lambda *_: False)
    run = first_violation(
        range(200),
        wanted=lambda schedule: (
            with_rollout_faults(schedule)
            and schedule.config.schedule.name == "partial"
            and schedule.config.rollout.on_lost_version == "regenerate"
        ),
    )
    assert run.violated in (FURTHER, ENDS)


def test_a_relay_that_is_said_to_hold_too_much_is_noticed(monkeypatch):
    monkeypatch.setattr(Relay, "store", lambda self, version: self.versions.append(version))
    assert first_violation(range(20)).violated == GROWS


def test_a_count_that_is_off_is_noticed(monkeypatch):
    drop = ExperienceBuffer.drop

    def miscounting(self, group, reason, **options):
        drop(self, group, reason, **options)
        self.admitted += 1

    monkeypatch.setattr(ExperienceBuffer, "drop", miscounting)
    run = first_violation(range(60))
    assert run.violated == COUNTS


def test_a_worker_that_is_given_up_too_early_is_noticed(monkeypatch):
    make = WorkerRegistry.__init__

    def impatient(self, *arguments, silence_limit_s, **options):
        make(self, *arguments, silence_limit_s=silence_limit_s / 3, **options)

    monkeypatch.setattr(WorkerRegistry, "__init__", impatient)
    run = first_violation(range(100))
    assert run.violated == CAUSE


def test_a_wait_that_only_its_limit_ends_is_noticed(monkeypatch):
    monkeypatch.setattr(RolloutFleet, "wake_all", lambda self: None)
    run = first_violation(range(20))
    assert run.violated == ENDS and "controller.step_timeout_s" in run.report


def test_a_wait_without_a_limit_is_noticed(monkeypatch):
    make_driver, make_trainer = RolloutDriver.__init__, TrainerDriver.__init__

    def patient(self, *arguments, **options):
        make_trainer(self, *arguments, **options)
        self._limit_s = 1e6

    monkeypatch.setattr(RolloutFleet, "wake_all", lambda self: None)
    monkeypatch.setattr(TrainerDriver, "__init__", patient)
    monkeypatch.setattr(
        RolloutDriver, "__init__", lambda self, *arguments, limit_s: make_driver(self, *arguments, limit_s=1e6)
    )
    run = first_violation(range(20))
    assert run.violated == FURTHER


def test_a_task_that_is_left_behind_is_noticed(monkeypatch):
    run_controller = Controller.run
    left = []

    async def careless(self, *arguments):
        left.append(asyncio.create_task(asyncio.sleep(100), name="nobody's"))
        await run_controller(self, *arguments)

    monkeypatch.setattr(Controller, "run", careless)
    run = first_violation(range(3))
    assert run.violated == ENDS and "tasks are left: nobody's" in run.report


def test_a_task_that_dies_unseen_is_noticed(monkeypatch):
    def broken(self, worker, message):
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)

    monkeypatch.setattr(RelayManager, "_on_ready", lambda self, worker: broken(self, worker, None))
    run = first_violation(range(3))
    assert run.violated == ENDS and "TaskDied" in run.report


def test_workers_that_are_not_told_to_end_are_noticed(monkeypatch):
    send_all = WorkerRegistry.send_all

    async def silent(self, message):
        if not isinstance(message, Shutdown):
            await send_all(self, message)

    monkeypatch.setattr(WorkerRegistry, "send_all", silent)
    run = first_violation(range(3))
    assert run.violated == ENDS and "were not told to end" in run.report


@pytest.mark.parametrize("error", [RunFailed("a whim"), RuntimeError("a bug"), KeyError("key")])
def test_a_failure_that_nothing_justifies_is_noticed(monkeypatch, error):
    async def failing(self):
        raise error

    monkeypatch.setattr(TrainerDriver, "run", failing)
    run = first_violation(range(3))
    assert run.violated == ENDS and type(error).__name__ in run.report


def test_the_same_runs_violate_nothing_without_a_fault_of_the_controllers():
    assert first_violation(range(20)) is None


def _with_departures(schedule):
    leave = (Drain, Remove, SpotNotice)
    return schedule.config.rollout.replicas > 1 and any(isinstance(fault, leave) for fault in schedule.faults)


def test_work_for_a_rollout_that_leaves_is_noticed(monkeypatch):
    leave = RolloutFleet.leave

    def forgets_to_tell_its_driver(self, name, reason, *, moves_after_s):
        leave(self, name, reason, moves_after_s=moves_after_s)
        if name in self.replicas:
            self.replicas[name].leaving = False

    monkeypatch.setattr(RolloutFleet, "leave", forgets_to_tell_its_driver)
    monkeypatch.setattr(RolloutFleet, "takes_work", lambda self, replica: True)
    monkeypatch.setattr(RolloutFleet, "at_work", property(lambda self: len(self.replicas)))
    run = first_violation(range(600), wanted=_with_departures)
    assert run.violated == HEALTHY


def test_trajectories_that_leave_with_their_rollout_are_noticed(monkeypatch):
    async def forgets_to_move(self, replica):
        replica.in_flight.clear()
        await self._manager.fleet.let_go(replica)
        raise WorkerLost("it has left")

    monkeypatch.setattr(RolloutDriver, "_leave", forgets_to_move)
    run = first_violation(range(600), wanted=_with_departures)
    assert run.violated in (PLACE, FURTHER)


def moves_kv(schedule):
    return schedule.config.repack.enabled and schedule.config.repack.move_kv != "never"


def test_exported_kv_that_is_kept_for_ever_is_noticed(monkeypatch):
    monkeypatch.setattr(KvExports, "over", lambda self, trajectory_id: None)
    assert first_violation(range(200), wanted=moves_kv).violated == KV


def test_exported_kv_of_another_trajectory_is_noticed(monkeypatch):
    def any_of_them(self, trajectory, policy_version):
        return next(iter(self), None)

    monkeypatch.setattr(KvExports, "of", any_of_them)
    assert first_violation(range(200), wanted=moves_kv).violated == KV

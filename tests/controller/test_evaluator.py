"""Evaluation while a whole controller trains, against workers that are not real."""

import asyncio
import sqlite3
from dataclasses import replace

import pytest

from laminar.controller.evaluator import NUMBERS_PER_LIFE
from laminar.controller.journal.journal import Journal
from laminar.controller.journal.restore import Restored, restore
from laminar.controller.journal.tables import create_tables
from laminar.controller.journal.writer import apply
from laminar.controller.recent_results import RecentResults
from laminar.controller.repl_commands import CommandError, execute
from laminar.errors import RunFailed, UserError
from laminar.observability import events as event_types
from laminar.protocol import messages
from tests.controller import fake_workers as fakes
from tests.controller.test_controller import Run

HELD_OUT = {"source": {"type": "jsonl", "path": "held-out.jsonl"}, "prompts": 3}


def experiment(evaluation=None, **overrides):
    return fakes.experiment(evaluation={**HELD_OUT, **(evaluation or {})}, **overrides)


def results(run):
    return [event.result for event in run.of(event_types.EvaluationFinished)]


def evaluated(run):
    """Messages of `Generate` with a trajectory of an evaluation, by rollout."""
    found = {}
    for worker in run.workers:
        for message in worker.received:
            if isinstance(message, messages.Generate):
                mine = [one for one in message.assignments if one.trajectory_id.startswith("e")]
                found.setdefault(worker.name, []).extend(mine)
    return {name: assignments for name, assignments in found.items() if assignments}


async def test_the_first_model_and_every_nth_step_are_evaluated_each_with_one_version(tmp_path):
    config = experiment({"every": 2, "samples": 2, "temperature": 0.5}, trainer__steps=4)
    run = await Run(config, tmp_path).to_the_end()
    first, *others = results(run)
    assert (first.step, first.policy_version) == (0, 0)
    assert [result.step >= due for result, due in zip(others, [2, 4], strict=True)] == [True, True]
    assert others[-1].step == 4  # waited for after the last step
    for result in results(run):
        assert (result.prompts, result.samples) == (3, 2)
        assert result.pass_at == {1: 0.5, 2: 1.0}  # the fake reward is 1 for even members
    for event in run.of(event_types.EvaluationResponses):
        assert [(one.prompt_id, one.sample) for one in event.responses] == [(p, s) for p in range(3) for s in range(2)]
        assert len({one.policy_version for one in event.responses}) == 1
    for assignments in evaluated(run).values():
        assert {one.temperature for one in assignments} == {0.5}


async def test_evaluation_is_no_part_of_training(tmp_path):
    """Neither the steps, nor the prompts that are drawn, nor the groups differ from those of a run without it."""
    runs = [
        await Run(config, tmp_path).to_the_end()
        for config in (fakes.experiment(), experiment({"every": 1, "share": 1.0}))
    ]
    assert not results(runs[0]) and results(runs[1])
    trained = [
        sorted(
            (group.group_id, group.prompt.prompt_id)
            for step in run.of(event_types.StepFinished)
            for group in step.groups
        )
        for run in runs
    ]
    assert trained[0] == trained[1]
    steps = runs[1].worker("trainer-0").steps
    assert sum(len(step.rewards) for step in steps) == 3 * 2 * 2
    scores = [m for w in runs[1].workers for m in w.received if isinstance(m, messages.ScoreTrajectory)]
    assert {m.evaluation for m in scores} == {True, False}
    assert all(m.evaluation == m.trajectory_id.startswith("e") for m in scores)


async def test_responses_are_cut_at_the_evaluations_own_length(tmp_path):
    run = await Run(experiment({"max_response_tokens": 7}), tmp_path).to_the_end()
    assert {one.max_new_tokens for assignments in evaluated(run).values() for one in assignments} == {7}
    assert {result.finish_length_fraction for result in results(run)} == {0.0}


class SlowAtEvaluation(fakes.FakeRollout):
    """Holds what is evaluated until it is let go; `most` is how many it held at once, over all rollouts."""

    held, most, let_go = 0, 0, None

    async def answer(self, message):
        if not isinstance(message, messages.Generate):
            async for answer in super().answer(message):
                yield answer
            return
        mine = [one for one in message.assignments if one.trajectory_id.startswith("e")]
        others = tuple(one for one in message.assignments if not one.trajectory_id.startswith("e"))
        async for answer in super().answer(messages.Generate(assignments=others)):
            yield answer
        if mine:
            cls = type(self)
            cls.held += len(mine)
            cls.most = max(cls.most, cls.held)
            await cls.let_go.wait()
            cls.held -= len(mine)
            async for answer in super().answer(messages.Generate(assignments=tuple(mine))):
                yield answer


async def test_evaluation_takes_its_share_and_training_goes_on_meanwhile(tmp_path):
    class Rollout(SlowAtEvaluation):
        let_go = asyncio.Event()

    config = experiment({"prompts": 20, "share": 0.25}, trainer__steps=6, rollout__replicas=4)
    run = Run(config, tmp_path, rollout=Rollout)
    ending = asyncio.create_task(run.to_the_end())
    run.controller.events.subscribe(
        lambda event: Rollout.let_go.set() if event.step == 6 else None, event_types.StepFinished
    )
    await ending
    assert len(run.of(event_types.StepFinished)) == 6
    assert Rollout.most == 8  # a quarter of 4 x 8
    (result,) = results(run)
    assert result.policy_version == 0  # the host stayed with it through all steps
    assert result.prompts == 20


class Dies(fakes.FakeRollout):
    """The first rollout to get a held-out prompt goes silent with it."""

    victim = None

    async def answer(self, message):
        evaluated_here = isinstance(message, messages.Generate) and any(
            one.trajectory_id.startswith("e") for one in message.assignments
        )
        if evaluated_here and type(self).victim is None:
            type(self).victim = self.name
        if type(self).victim == self.name and self.pid == 1:
            if isinstance(message, messages.Generate):
                yield messages.WorkerFailed(error="out of memory", user_error=False)
            return
        async for answer in super().answer(message):
            yield answer


async def test_a_lost_host_does_not_lose_the_evaluation(tmp_path):
    class Rollout(Dies):
        victim = None

    run = Run(experiment({"prompts": 5}, trainer__steps=4), tmp_path, rollout=Rollout)
    run.successor = Rollout
    await run.to_the_end()
    assert Rollout.victim is not None
    assert [event.rollout for event in run.of(event_types.RolloutLost)] == [Rollout.victim]
    (result,) = results(run)
    assert result.prompts == 5
    (responses,) = run.of(event_types.EvaluationResponses)
    assert {one.policy_version for one in responses.responses} == {result.policy_version}


async def test_an_evaluation_that_is_due_while_another_one_is_is_made_once(tmp_path):
    run = Run(experiment({"at_start": False}), tmp_path)

    def ask_twice(event):
        if event.step == 1:
            run.controller.evaluator.ask()
            run.controller.evaluator.ask()

    run.controller.events.subscribe(ask_twice, event_types.StepFinished)
    await run.to_the_end()
    assert len(results(run)) == len(run.of(event_types.EvaluationDue)) == 1
    assert any("left out" in event.text for event in run.of(event_types.Notice))


async def test_the_repl_asks_for_an_evaluation(tmp_path):
    run = Run(experiment({"at_start": False}), tmp_path)
    answers = []

    def ask(event):
        if event.step == 2:
            answers.append(execute("evaluate", run.controller, RecentResults(run.controller.events)))

    run.controller.events.subscribe(ask, event_types.StepFinished)
    await run.to_the_end()
    (answer,) = answers
    assert answer.data == {"least_version": 2}
    assert answer.text == "held-out prompts are evaluated with version 2 or a newer one"
    assert [result.step >= 2 for result in results(run)] == [True]


async def test_the_repl_says_why_there_is_nothing_to_evaluate(tmp_path):
    run = Run(fakes.experiment(), tmp_path)
    with pytest.raises(CommandError, match="no held-out prompts; give its config a section `evaluation`"):
        execute("evaluate", run.controller, RecentResults(run.controller.events))


async def test_a_rollout_that_leaves_hands_the_evaluation_on(tmp_path):
    """Its host is drained before it is through: another rollout of its version goes on, or all starts over; it ends complete."""
    run = Run(experiment({"prompts": 30, "share": 0.1}, trainer__steps=6), tmp_path)
    left = []

    def drain():
        left.append(next(iter(run.controller.evaluator.running.hosts)))
        run.controller.fleet.leave(left[0], "a person said so", moves_after_s=None)

    def on_scored(event):
        if event.trajectory.evaluation is not None and not left:
            drain()

    run.controller.events.subscribe(on_scored, event_types.TrajectoryScored)
    await run.to_the_end()
    (result,) = results(run)
    assert result.prompts == 30
    assert left[0] not in run.controller.rollouts.replicas
    other = next(worker.name for worker in run.workers if worker.name.startswith("rollout") and worker.name != left[0])
    assert evaluated(run)[other]


@pytest.mark.parametrize("evaluating", [True, False])
async def test_another_controller_makes_an_evaluation_that_was_due_or_under_way_anew_and_under_other_names(
    tmp_path, evaluating
):
    """A rollout may still hold trajectories of the one that was begun."""
    run = Run(experiment({"at_start": False}), tmp_path)
    evaluator = run.controller.evaluator
    assert not evaluator.busy
    evaluator.take_back(Restored(life=2, policy_version=0, evaluating=evaluating))
    assert evaluator.busy is evaluating
    if evaluating:
        await run.to_the_end()
        [result] = results(run)
        assert result.evaluation > 2 * NUMBERS_PER_LIFE
        names = [one.trajectory_id for assignments in evaluated(run).values() for one in assignments]
        assert names and all(name.startswith(f"e{result.evaluation}-") for name in names)


def test_evaluations_are_in_the_journal_from_when_they_are_due():
    """Also one that is due while another one runs, whose end is not its end."""
    events, connection = event_types.EventBus(), sqlite3.connect(":memory:", isolation_level=None)
    create_tables(connection)

    class Writer:
        def submit(self, transaction):
            apply(connection, transaction.statements)

    async def written_after(*happened):
        for event in happened:
            events.emit(event)
        journal._flush(durable=False)
        return restore(connection).evaluating

    journal = Journal(Writer(), keep_checkpoints=1, keep_trained=True, limit_s=1.0)
    journal.subscribe(events)
    due = event_types.EvaluationDue(least_version=0)
    finished = event_types.EvaluationFinished(result=None)
    assert asyncio.run(written_after()) is False
    assert asyncio.run(written_after(due)) is True
    assert asyncio.run(written_after(due, finished)) is True
    assert asyncio.run(written_after(finished)) is False


async def test_a_stop_does_not_wait_for_an_evaluation(tmp_path):
    class Rollout(SlowAtEvaluation):
        let_go = asyncio.Event()  # never

    run = Run(experiment(trainer__steps=50), tmp_path, rollout=Rollout)
    run.controller.events.subscribe(
        lambda event: run.controller.control.stop() if event.step == 1 else None, event_types.StepFinished
    )
    await run.to_the_end()
    assert not results(run)
    assert any("the evaluation was given up" in event.text for event in run.of(event_types.Notice))


class FailingReward(fakes.FakeEnvironment):
    def score(self, message):
        scored = super().score(message)
        if message.trajectory_id.startswith("e") and message.prompt_text == "1":
            return messages.TrajectoryScored(
                trajectory_id=message.trajectory_id, reward=float("nan"), response_text="", error="the reward raised"
            )
        return scored


async def test_a_response_whose_reward_fails_counts_as_wrong_and_ends_nothing(tmp_path):
    run = await Run(experiment(), tmp_path, environment=FailingReward).to_the_end()
    (result,) = results(run)
    assert (result.errors, result.pass_at[1]) == (1, pytest.approx(2 / 3))
    (responses,) = run.of(event_types.EvaluationResponses)
    assert [one.error for one in responses.responses] == ["", "the reward raised", ""]


class LongPrompts(fakes.FakeEnvironment):
    lengths = (3, 9, 3) * 300


class OnlyLongPrompts(fakes.FakeEnvironment):
    async def answer(self, message):
        async for answer in super().answer(message):
            if isinstance(answer, messages.PromptsFetched) and answer.evaluation:
                answer = messages.PromptsFetched(start=answer.start, prompts=(), exhausted=True, evaluation=True)
            yield answer


async def test_a_held_out_prompt_that_is_too_long_is_left_out_and_counted(tmp_path):
    run = await Run(experiment(), tmp_path, environment=LongPrompts).to_the_end()
    assert [(result.prompts, result.prompts_rejected) for result in results(run)] == [(2, 1)]


@pytest.mark.parametrize("bad", [(1,), (0, 1, 2)])
async def test_a_held_out_prompt_with_which_the_environment_cannot_begin_is_left_out(tmp_path, bad):
    class CannotBegin(fakes.FakeEnvironment):
        async def answer(self, message):
            async for answer in super().answer(message):
                if isinstance(answer, messages.PromptsFetched) and answer.evaluation:
                    prompts = [replace(p, error="no number" if p.prompt_id in bad else "") for p in answer.prompts]
                    answer = replace(answer, prompts=tuple(prompts))
                yield answer

    going = Run(experiment(), tmp_path, environment=CannotBegin)
    if len(bad) == 3:
        with pytest.raises(RunFailed, match="none of its first 3 prompts can be used: prompt 2: no number"):
            await going.to_the_end()
        return
    run = await going.to_the_end()
    assert [(result.prompts, result.prompts_rejected) for result in results(run)] == [(2, 1)]
    notices = [event.text for event in run.of(event_types.Notice)]
    assert "1 of 3 held-out prompts are left out: prompt 1: no number" in notices


async def test_a_source_without_a_prompt_that_fits_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"evaluation.source: none of its first 0 prompts"):
        await Run(experiment(), tmp_path, environment=OnlyLongPrompts).to_the_end()

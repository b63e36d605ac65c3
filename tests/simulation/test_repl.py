"""The REPL's commands on a controller in virtual time: the same code as on a live run."""

from laminar.controller.recent_results import RecentResults
from laminar.controller.repl_commands import execute
from laminar.observability.events import StepFinished
from tests.simulation.small_cluster import Recorded, experiment


def test_the_repl_shows_and_steers_a_run_in_virtual_time():
    answers = {}

    def ask(run):
        recent = RecentResults(run.events)
        for line in ("status", "rollouts", "relays", "trainer", "buffer", "trajectory"):
            answers[line] = execute(line, run.controller, recent).text
        execute("pause generation", run.controller, recent)
        run.loop.call_later(30.0, execute, "resume generation", run.controller, recent)

    at = Recorded(experiment(trainer__steps=6)).at(3.0, ask)
    at.to_the_end()
    assert "rollout-3" in answers["rollouts"]
    assert "relay-1" in answers["relays"]
    assert "of 6" in answers["status"]
    steps = at.of(StepFinished)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert at.record.steps[-1].time_s > 30  # the pause was kept, in virtual seconds


def test_stop_in_virtual_time_ends_after_the_step():
    at = Recorded(experiment(trainer__steps=50)).at(
        3.0, lambda run: execute("stop", run.controller, RecentResults(run.events))
    )
    at.to_the_end()
    assert 0 < len(at.of(StepFinished)) < 50

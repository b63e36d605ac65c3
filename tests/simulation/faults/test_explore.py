"""Exploration: random fault schedules against the real controller. The first test is the point of the whole folder."""

import json

import pytest

from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.errors import UserError
from laminar.simulation.faults import command
from laminar.simulation.faults.command import simulate_faults
from laminar.simulation.faults.explore import explore, replay
from laminar.simulation.faults.fault_schedule import FaultSchedule
from laminar.simulation.faults.run_schedule import run_schedule

SEEDS = 500


@pytest.mark.timeout(300)
def test_every_invariant_holds_under_random_fault_schedules():
    result = explore(range(SEEDS), processes=2)
    text = "\n\n".join(f"laminar simulate --faults --seed {run.seed}\n{run.report}" for run in result.violations)
    assert not result.violations, text
    assert result.runs == SEEDS
    assert set(result.schedules) == {"laminar", "partial", "synchronous", "one_step", "stream"}
    # A test in which nothing goes wrong would prove nothing.
    for repair in (
        "TrajectoryOrphaned",
        "TrajectoryRestarted",
        "RolloutsRepacked",
        "TrainerRestarted",
        "GroupsReturned",
    ):
        assert result.happened[repair] >= 10, result.happened
    assert result.happened["PromptRejected"] and result.happened["GroupDropped"]
    assert result.endings["all steps made"] > SEEDS / 2
    assert result.endings["stopped"] and result.endings["the data ended"]


def test_a_replay_is_the_run_that_was_explored():
    found = []
    explore(range(20, 24), processes=1, progress=found.append)
    assert [run.seed for run in found] == [20, 21, 22, 23]
    for run in found:
        again = replay(run.seed)
        assert (again.digest, again.report, again.lines) == (run.digest, run.report, run.lines)
        assert len(again.log.splitlines()) == again.lines


def test_several_processes_find_what_one_finds():
    alone, together = explore(range(14), processes=1), explore(range(14), processes=2)
    assert alone == together


def test_the_command_passes_and_prints_a_table(capsys):
    assert simulate_faults(seeds=4, processes=1) == 0
    output = capsys.readouterr().out
    assert "4 fault schedules" in output and "violations" in output and "fault: " in output


def test_a_violation_is_shrunk_and_can_be_replayed(monkeypatch, capsys):
    """A controller that loses every orphan."""
    orphan = PartialResponsePool.orphan

    def losing(self, trajectory):
        orphan(self, trajectory)
        del self.orphans[trajectory.trajectory_id]

    monkeypatch.setattr(PartialResponsePool, "orphan", losing)
    monkeypatch.setattr(command, "SHRUNK", 1)
    assert simulate_faults(seeds=24, processes=1) == 1
    output = capsys.readouterr().out
    assert "a trajectory in progress is in one place" in output
    line = next(line for line in output.splitlines() if line.startswith("replay: "))
    seed = int(line.rpartition(" ")[2])
    assert line == f"replay: laminar simulate --faults --seed {seed}"
    shortest = FaultSchedule.from_json(next(line for line in output.splitlines() if line.startswith('{"seed"')))
    assert len(shortest.faults) == 1
    assert run_schedule(shortest).violated == "a trajectory in progress is in one place"
    assert "event    RolloutLost" in output or "TrajectoryOrphaned" in output
    assert simulate_faults(seeds=1, seed=seed) == 1
    replayed = capsys.readouterr().out
    assert json.loads(replayed.splitlines()[0])["seed"] == seed
    assert "in no place" in replayed


@pytest.mark.parametrize(
    "numbers", [{"seeds": 0}, {"seeds": 1, "processes": 0}, {"seeds": 1, "first_seed": -1}, {"seeds": 1, "seed": -2}]
)
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(UserError, match="expected"):
        simulate_faults(**numbers)

"""How long trajectories waited for another rollout is counted once for each loss, whatever becomes of them."""

from laminar.controller.recoveries import Recoveries
from laminar.observability.events import (
    EventBus,
    GroupDropped,
    TrajectoriesRecovered,
    TrajectoryFinished,
    TrajectoryMoved,
    TrajectoryRestarted,
)
from tests.run_parts import HandClock, a_group


class Case:
    def __init__(self):
        self.now = HandClock(10.0)
        self.events = EventBus()
        self.told = []
        self.events.subscribe(self.told.append, TrajectoriesRecovered)
        self.recoveries = Recoveries(self.events, self.now)
        self.group = a_group(1)
        self.first, self.second = self.group.trajectories

    def lose_both(self, rollout="rollout-0"):
        for trajectory in (self.first, self.second):
            self.recoveries.orphaned(trajectory, rollout)


def recovered(rollout, trajectories, seconds, regenerated=0):
    return TrajectoriesRecovered(rollout=rollout, trajectories=trajectories, regenerated=regenerated, seconds=seconds)


def test_the_last_to_go_on_tells():
    case = Case()
    case.lose_both()
    case.now.now += 1
    case.events.emit(TrajectoryMoved(trajectory=case.first, rollout="rollout-1"))
    assert case.told == []
    case.now.now += 2
    case.events.emit(TrajectoryMoved(trajectory=case.second, rollout="rollout-1"))
    assert case.told == [recovered("rollout-0", 2, 3.0)]


def test_those_that_start_anew_or_end_count_too():
    case = Case()
    case.lose_both()
    case.events.emit(TrajectoryRestarted(trajectory=case.first, lost_tokens=3))
    case.events.emit(TrajectoryMoved(trajectory=case.first, rollout="rollout-1"))
    case.events.emit(TrajectoryFinished(trajectory=case.second))
    assert case.told == [recovered("rollout-0", 2, 0.0, regenerated=1)]


def test_a_dropped_group_is_waited_for_no_longer():
    case = Case()
    case.lose_both()
    case.events.emit(GroupDropped(group=case.group, reason="test"))
    assert case.told == [recovered("rollout-0", 2, 0.0)]


def test_a_second_loss_is_another_one():
    case = Case()
    case.lose_both()
    for trajectory in (case.first, case.second):
        case.events.emit(TrajectoryMoved(trajectory=trajectory, rollout="rollout-1"))
    case.recoveries.orphaned(case.first, "rollout-1")
    case.now.now += 4
    case.events.emit(TrajectoryMoved(trajectory=case.first, rollout="rollout-0"))
    assert case.told[1:] == [recovered("rollout-1", 1, 4.0)]


def test_others_that_move_are_none_of_its_business():
    case = Case()
    case.events.emit(TrajectoryMoved(trajectory=case.first, rollout="rollout-1"))
    assert case.told == []

import pytest

from laminar.controller.repack_ledger import RepackLedger
from laminar.controller.repack_planner import Move
from laminar.observability.events import (
    EventBus,
    GroupDropped,
    KvMoved,
    RepackSettled,
    RolloutLost,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryMoved,
)
from tests.run_parts import HandClock, a_group


class World:
    def __init__(self):
        self.events = EventBus()
        self.now = HandClock()
        self.ledger = RepackLedger(self.events, self.now)
        self.settled = []
        self.events.subscribe(self.settled.append, RepackSettled)

    def generate(self, rollout, tokens):
        self.events.emit(TokensAppended(rollout=rollout, tokens=tokens, late_tokens=0, kv_utilization=0.1))


@pytest.fixture
def world():
    return World()


def move(source="a", target="b"):
    return Move(source=source, target=target, context_tokens=10, frees_s=40.0, costs_s=3.0)


def test_a_move_is_settled_when_all_that_it_moved_has_ended(world):
    group = a_group(tokens=5)
    one, two = group.trajectories
    world.generate("a", 100)  # before the move: not its gain
    world.ledger.moved(move(), group.trajectories, stopped_at=99.0)
    world.events.emit(TrajectoryMoved(trajectory=one, rollout="b"))
    world.now.now += 2
    world.events.emit(TrajectoryMoved(trajectory=two, rollout="b"))
    world.events.emit(
        KvMoved(rollout="b", trajectory_id=two.trajectory_id, tokens=4, nbytes=4096, seconds=0.1, error="")
    )
    world.events.emit(KvMoved(rollout="b", trajectory_id="other", tokens=4, nbytes=4096, seconds=0.1, error=""))
    world.generate("a", 30)
    world.generate("b", 1000)
    world.events.emit(TrajectoryFinished(trajectory=one))
    assert not world.settled
    world.now.now += 8
    world.generate("a", 12)
    world.events.emit(TrajectoryFinished(trajectory=two))
    context = len(one.prompt.token_ids) + 5
    assert world.settled == [
        RepackSettled(
            source="a",
            target="b",
            trajectories=2,
            tokens=2 * context,
            kv_tokens=4,
            kv_bytes=4096,
            planned_frees_s=40.0,
            planned_costs_s=3.0,
            freed_s=11.0,
            pause_s_mean=2.0,
            pause_s_max=3.0,
            gained_tokens=42,
        )
    ]
    world.generate("a", 7)
    world.events.emit(TrajectoryFinished(trajectory=one))
    assert len(world.settled) == 1


def test_a_trajectory_that_moves_twice_holds_both_sources(world):
    group = a_group()
    world.ledger.moved(move("a", "b"), group.trajectories, stopped_at=100.0)
    world.ledger.moved(move("b", "c"), group.trajectories[:1], stopped_at=100.0)
    world.generate("a", 1)
    world.generate("b", 2)
    world.events.emit(TrajectoryFinished(trajectory=group.trajectories[0]))
    assert [(one.source, one.gained_tokens) for one in world.settled] == [("b", 2)]
    world.generate("a", 4)
    world.events.emit(TrajectoryFinished(trajectory=group.trajectories[1]))
    assert [(one.source, one.gained_tokens) for one in world.settled] == [("b", 2), ("a", 5)]


def test_a_token_counts_for_one_move_only(world):
    first, second = a_group(0), a_group(1)
    world.ledger.moved(move(), first.trajectories, stopped_at=100.0)
    world.generate("a", 10)
    world.ledger.moved(move(), second.trajectories, stopped_at=100.0)  # emptied again
    world.generate("a", 5)
    world.events.emit(TrajectoryFinished(trajectory=first.trajectories[0]))
    world.events.emit(GroupDropped(group=second, reason="too old"))
    assert [one.gained_tokens for one in world.settled] == [10, 5]


def test_a_lost_source_gains_nothing_more(world):
    group = a_group()
    world.ledger.moved(move(), group.trajectories, stopped_at=100.0)
    world.events.emit(RolloutLost(rollout="a", reason="gone", trajectories=0))
    world.events.emit(RolloutLost(rollout="a", reason="gone", trajectories=0))
    world.events.emit(TrajectoryFinished(trajectory=group.trajectories[0]))
    assert [one.gained_tokens for one in world.settled] == [0]
    world.ledger.moved(move(), [], stopped_at=100.0)  # all of them were lost half-way
    assert len(world.settled) == 1

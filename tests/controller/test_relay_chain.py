"""RelayChain: what it orders in a few plain cases, and its invariants under any sequence of what can happen."""

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from laminar.controller.relay_chain import Node, Numbers, RelayChain
from laminar.protocol import messages

STALL_S = 5.0
CHUNKS = 100


def node(name):
    if name == "trainer-0":
        return Node(name=name)
    rank = int(name.removeprefix("relay-"))
    alone = rank % 3 == 2  # was started outside of mpirun
    return Node(name=name, address=f"{name}:7000", world="" if alone else "mpirun-1", world_rank=-1 if alone else rank)


def nodes(*ranks):
    return [node(f"relay-{rank}") for rank in ranks]


def new_chain():
    return RelayChain(
        policy_version=7, numbers=Numbers(), chunk_bytes=4096, encoding="full", deadline=60.0, stall_limit_s=STALL_S
    )


def stored():
    return messages.WeightsStored(
        policy_version=7,
        seconds=1.0,
        nbytes=1,
        received_bytes=1,
        chunks=CHUNKS,
        damaged=0,
        latency_s=0.0,
        bytes_per_s=0.0,
    )


def progress(received):
    return messages.CarryProgress(policy_version=7, order=1, received=received, sent=0, chunks=CHUNKS)


def hop_failed(order):
    return messages.HopFailed(policy_version=7, epoch=order.epoch, peer=order.peer, error="connection reset")


def shape(orders):
    """(name, upstream, downstream) of each order."""
    return [
        (name, carry.upstream and carry.upstream.peer, carry.downstream and carry.downstream.peer)
        for name, carry in orders
    ]


# ---------------------------------------------------------------- plain cases


def test_the_first_who_holds_the_version_is_the_head():
    chain = new_chain()
    orders = chain.start(0.0, nodes(1, 0), nodes(3, 4))
    assert shape(orders) == [
        ("relay-1", None, "relay-3"),
        ("relay-3", "relay-1", "relay-4"),
        ("relay-4", "relay-3", None),
    ]
    assert [carry.order for _, carry in orders] == [1, 2, 3]


def test_hops_go_by_mpi_within_a_world_and_by_tcp_to_others():
    chain = new_chain()
    (_, head), (_, middle), (_, last) = chain.start(0.0, nodes(0), nodes(1, 2))
    assert (head.downstream.world_rank, head.downstream.address) == (1, "")
    assert (middle.upstream.world_rank, middle.downstream.world_rank) == (0, -1)
    assert middle.downstream.address == "relay-2:7000"
    assert (last.upstream.world_rank, last.upstream.address) == (-1, "")


def test_a_loss_concerns_its_neighbours_only():
    chain = new_chain()
    started = dict(chain.start(0.0, nodes(0), nodes(1, 3, 4, 6)))
    orders = chain.lost(1.0, "relay-3", "it was lost")
    assert shape(orders) == [("relay-1", "relay-0", "relay-4"), ("relay-4", "relay-1", "relay-6")]
    healed = dict(orders)
    assert healed["relay-1"].upstream == started["relay-1"].upstream
    assert healed["relay-4"].downstream == started["relay-4"].downstream
    assert chain.left_out == {"relay-3": "it was lost"}


def test_who_has_most_becomes_head_when_the_head_is_lost_and_the_trainer_sends():
    chain = new_chain()
    chain.start(0.0, [*nodes(0), node("trainer-0")], nodes(1, 3, 4))
    chain.progress(1.0, "relay-3", progress(60))
    chain.progress(1.0, "relay-1", progress(20))
    orders = chain.lost(1.0, "relay-0", "it was lost")
    assert chain.members == ("trainer-0", "relay-3", "relay-1", "relay-4")
    assert shape(orders)[0] == ("trainer-0", None, "relay-3")


def test_nobody_holds_it_any_more():
    chain = new_chain()
    chain.start(0.0, nodes(0), nodes(1, 3))
    assert chain.lost(1.0, "relay-0", "it was lost") == []
    assert chain.no_source and chain.done


def test_a_failed_hop_is_tried_again_by_tcp_and_then_its_end_is_left_out():
    chain = new_chain()
    orders = dict(chain.start(0.0, nodes(0), nodes(1, 3)))
    for _ in range(2):
        orders = dict(chain.hop_failed(1.0, hop_failed(orders["relay-1"].upstream)))
        assert orders["relay-1"].upstream.world_rank == -1
    orders = chain.hop_failed(1.0, hop_failed(orders["relay-1"].upstream))
    assert shape(orders) == [("relay-0", None, "relay-3"), ("relay-3", "relay-0", None)]
    assert "connection reset" in chain.left_out["relay-1"]


def test_a_silent_member_is_left_out_and_a_hop_that_stands_still_is_replaced():
    chain = new_chain()
    chain.start(0.0, nodes(0), nodes(1, 3))
    for name in ("relay-0", "relay-3"):
        chain.progress(4.0, name, progress(0))
    orders = chain.look(5.5)
    assert shape(orders) == [("relay-0", None, "relay-3"), ("relay-3", "relay-0", None)]
    assert chain.left_out["relay-1"] == "nothing heard of it for 5.5 s (relay.stall_limit_s)"
    before = dict(orders)["relay-3"].upstream.epoch
    for name in ("relay-0", "relay-3"):
        chain.progress(9.0, name, progress(0))
    orders = dict(chain.look(11.0))
    assert orders["relay-3"].upstream.epoch > before
    assert "relay-3" not in chain.left_out


# ---------------------------------------------------------------- any sequence


def goes_on(machine):
    """A broadcast that has no source ends, and nobody asks its chain any more."""
    return not machine.chain.no_source


class AnySequence(RuleBasedStateMachine):
    """Members are told by orders alone; after each of these the chain must be one that can get done."""

    NAMES = ("trainer-0", *(f"relay-{rank}" for rank in range(8)))

    @initialize(data=st.data())
    def start(self, data):
        self.now = 0.0
        self.chain = new_chain()
        self.told = {}  # name -> its newest order
        self.has_it = set()  # whoever says so
        self.epochs = {}  # epoch -> the two that it joins
        names = data.draw(st.permutations(self.NAMES))
        count = data.draw(st.integers(1, 3))
        holders, missing = names[:count], [name for name in names[count:6] if name != "trainer-0"]
        assume(missing)
        self.has_it |= set(holders)
        self.take(self.chain.start(self.now, map(node, holders), map(node, missing)))

    def take(self, orders):
        assert len({name for name, _ in orders}) == len(orders), "two orders at once"
        for name, carry in orders:
            assert name in self.chain.members
            assert name not in self.told or self.told[name].order < carry.order
            self.told[name] = carry
            for hop, ends in (
                (carry.upstream, (hop_peer(carry.upstream), name)),
                (carry.downstream, (name, hop_peer(carry.downstream))),
            ):
                if hop is not None:
                    assert self.epochs.setdefault(hop.epoch, ends) == ends, "an epoch is used twice"

    def any_member(self, data):
        return data.draw(st.sampled_from(self.chain.members))

    @rule(seconds=st.floats(0.1, 7.0))
    def time_passes(self, seconds):
        self.now += seconds

    @precondition(lambda self: goes_on(self) and self.chain.members)
    @rule(data=st.data())
    def lost(self, data):
        name = self.any_member(data)
        members, was_head = self.chain.members, name == self.chain.members[0]
        place = members.index(name)
        orders = self.chain.lost(self.now, name, "it was lost")
        self.has_it.discard(name)
        self.told.pop(name, None)
        self.take(orders)
        if not was_head or self.chain.members[:1] == members[1:2]:
            neighbours = {*members[max(0, place - 1) : place], *members[place + 1 : place + 2]}
            assert {name for name, _ in orders} <= neighbours

    @precondition(goes_on)
    @rule(data=st.data())
    def lost_outside(self, data):
        name = data.draw(st.sampled_from(self.NAMES))
        if name not in self.chain.members:
            self.has_it.discard(name)
            assert self.chain.lost(self.now, name, "it was lost") == []

    @precondition(goes_on)
    @rule(data=st.data())
    def add(self, data):
        """A process comes, new or in place of one that was lost; as the registry tells."""
        name = data.draw(st.sampled_from(self.NAMES[1:]))
        if name in self.chain.members:
            return
        holds = data.draw(st.booleans())
        (self.has_it.add if holds else self.has_it.discard)(name)
        self.told.pop(name, None)
        self.take(self.chain.add(self.now, node(name), holds=holds))

    @precondition(lambda self: goes_on(self) and self.chain.members)
    @rule(data=st.data())
    def stored(self, data):
        """Any member: it may have found the version in its own store."""
        name = self.any_member(data)
        self.has_it.add(name)
        self.chain.stored(self.now, name, stored())

    @precondition(lambda self: goes_on(self) and self.chain.members)
    @rule(data=st.data(), received=st.integers(0, CHUNKS))
    def progress(self, data, received):
        self.chain.progress(self.now, self.any_member(data), progress(received))

    @precondition(lambda self: goes_on(self) and self.epochs)
    @rule(data=st.data())
    def hop_failed(self, data):
        epoch = data.draw(st.sampled_from(sorted(self.epochs)))  # also one that is given up
        upstream, _ = self.epochs[epoch]
        before = set(self.chain.members)
        orders = self.chain.hop_failed(
            self.now, messages.HopFailed(policy_version=7, epoch=epoch, peer=upstream, error="reset")
        )
        self.leave_out(before)
        self.take(orders)

    @precondition(lambda self: goes_on(self) and self.chain.members)
    @rule(data=st.data())
    def carry_failed(self, data):
        name = self.any_member(data)
        before = set(self.chain.members)
        failed = messages.CarryFailed(policy_version=7, order=0, error="no room")
        self.has_it.discard(name)
        orders = self.chain.carry_failed(self.now, name, failed)
        self.leave_out(before)
        self.take(orders)

    @precondition(goes_on)
    @rule()
    def look(self):
        before = set(self.chain.members)
        orders = self.chain.look(self.now)
        self.leave_out(before)
        self.take(orders)

    def leave_out(self, before):
        for name in before - set(self.chain.members):
            assert (name in self.chain.left_out) == (name not in self.has_it)  # who has it lacks nothing
            self.has_it.discard(name)
            self.told.pop(name, None)

    @invariant()
    def every_member_without_the_version_has_a_way_to_one_that_holds_it(self):
        chain = self.chain
        if chain.no_source:
            return
        for name in chain.waiting_for():
            seen = [name]
            while seen[-1] not in self.has_it:
                order = self.told.get(seen[-1])
                assert order is not None and order.upstream is not None, f"{seen[-1]} has no upstream"
                assert order.upstream.peer in chain.members, f"{seen[-1]} waits for {order.upstream.peer}, who is gone"
                assert order.upstream.peer not in seen, f"a ring: {seen}"
                seen.append(order.upstream.peer)

    @invariant()
    def both_ends_of_a_hop_know_it(self):
        if self.chain.no_source:
            return
        for name in self.chain.waiting_for():
            upstream = self.told[name].upstream
            other = self.told[upstream.peer].downstream
            assert other is not None and (other.peer, other.epoch) == (name, upstream.epoch)
            assert (other.world_rank >= 0) == (upstream.world_rank >= 0)
            assert bool(other.address) == (other.world_rank < 0)

    @invariant()
    def it_is_done_when_nobody_lacks_the_version(self):
        assert self.chain.done == (self.chain.no_source or not self.chain.waiting_for())
        if self.chain.no_source:
            assert not self.has_it & set(self.chain.members)


def hop_peer(hop):
    return None if hop is None else hop.peer


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=150, stateful_step_count=25)
TestAnySequence.pytestmark = [pytest.mark.timeout(60)]

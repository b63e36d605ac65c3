"""The chain that one version travels down, as a state machine: what happened goes in, orders to relays come out.

    head --> member --> member --> member          the head holds the version, every other member is to get it

Invariants:
- Every member that lacks the version has exactly one upstream neighbour, and following these leads to one that holds it.
- A hop's epoch is never used twice. Losing a member gives new orders to its two neighbours and to nobody else.

It knows no clock and sends nothing: times come in with what happened, in seconds on the controller's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Literal

from laminar.protocol.messages import Carry, CarryFailed, CarryProgress, HopFailed, HopOrder, WeightsStored

NUMBERS_PER_LIFE = 1 << 32  # of one controller
HOP_ATTEMPTS = 3  # between the same two members; then the downstream one is left out

Orders = list[tuple[str, Carry]]


@dataclass(kw_only=True, slots=True, frozen=True)
class Node:
    """A worker that can be part of a chain, and the ways to it."""

    name: str
    address: str = ""  # where it takes TCP hops; empty: it takes none (the trainer)
    world: str = ""  # its mpirun world; empty outside of one
    world_rank: int = -1


class Numbers:
    """Numbers that grow over all broadcasts of a run, whichever controller starts them."""

    def __init__(self, *, life: int = 0) -> None:
        """`life`: controllers that the run has had before."""
        self.order = count(1 + life * NUMBERS_PER_LIFE)
        self.epoch = count(1 + life * NUMBERS_PER_LIFE)


@dataclass(kw_only=True, slots=True)
class _Member:
    node: Node
    stored: bool = False
    received: int = 0  # chunks
    moved: float = 0.0  # when it last had more chunks, or another upstream
    heard: float = 0.0  # when it last said anything, or was last told anything
    neighbours: tuple[HopOrder | None, HopOrder | None] | None = None  # as it was last told
    order: int = 0  # the last that it was given


@dataclass(kw_only=True, slots=True)
class _Hop:
    epoch: int
    by_mpi: bool


@dataclass(kw_only=True, slots=True)
class RelayChain:
    """One broadcast of one version."""

    policy_version: int
    numbers: Numbers
    chunk_bytes: int
    encoding: Literal["full", "delta"]
    deadline: float
    stall_limit_s: float
    left_out: dict[str, str] = field(default_factory=dict)  # members that the chain goes on without -> why
    repairs: int = 0  # times that a chain under way was changed
    no_source: bool = False  # nobody holds the version any more
    answers: dict[str, WeightsStored] = field(default_factory=dict)  # of members that have stored it
    _members: dict[str, _Member] = field(default_factory=dict)  # in the order of the chain
    _hops: dict[tuple[str, str], _Hop] = field(default_factory=dict)
    _attempts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _spare: dict[str, Node] = field(default_factory=dict)  # hold the version, and stay outside unless they are needed

    def start(self, now: float, holders: Iterable[Node], missing: Iterable[Node]) -> Orders:
        """The first holder becomes the head; the others take its place when it is lost."""
        self._spare = {node.name: node for node in holders}
        self._members = {node.name: _Member(node=node, moved=now) for node in missing}
        return self._arrange(now)

    @property
    def members(self) -> tuple[str, ...]:
        """Names in the order of the chain, the head first."""
        return tuple(self._members)

    @property
    def done(self) -> bool:
        """Every member has the version, or nobody can give it to them."""
        return self.no_source or all(member.stored for member in self._members.values())

    def holds(self, name: str) -> bool:
        """Whether a member was taken for one that has the version."""
        return name in self._members and self._members[name].stored

    def obeys(self, name: str, order: int) -> bool:
        """Whether this is the newest order that a member was given."""
        return name in self._members and self._members[name].order == order

    def waiting_for(self) -> list[str]:
        """Members that lack the version."""
        return [name for name, member in self._members.items() if not member.stored]

    def add(self, now: float, node: Node, *, holds: bool) -> Orders:
        """A worker has come (again): to the end of the chain, or to those who can be its head."""
        self.left_out.pop(node.name, None)
        self._spare.pop(node.name, None)  # what it held before counts no more
        self._attempts = Counter({pair: n for pair, n in self._attempts.items() if node.name not in pair})
        if holds:
            self._spare[node.name] = node
        else:
            self._members[node.name] = _Member(node=node, moved=now)
        return self._arrange(now)

    def lost(self, now: float, name: str, reason: str) -> Orders:
        """A worker is gone, or is not to be waited for."""
        self._spare.pop(name, None)
        member = self._members.pop(name, None)
        if member is None:
            return []
        if not member.stored:
            self.left_out[name] = reason
        self.repairs += 1
        self._hops = {pair: hop for pair, hop in self._hops.items() if name not in pair}
        return self._arrange(now)

    def stored(self, now: float, name: str, message: WeightsStored) -> None:
        """A member has the version."""
        self.answers[name] = message
        member = self._members.get(name)
        if member is not None:
            member.stored, member.heard, member.moved = True, now, now
            member.received = message.chunks

    def progress(self, now: float, name: str, message: CarryProgress) -> None:
        """A member says how far it is."""
        member = self._members.get(name)
        if member is None:
            return
        member.heard = now
        if message.received > member.received:
            member.received, member.moved = message.received, now

    def hop_failed(self, now: float, message: HopFailed) -> Orders:
        """One end of a hop has lost the other, which may live all the same: another hop between the same two, by TCP."""
        pair = next((pair for pair, hop in self._hops.items() if hop.epoch == message.epoch), None)
        return [] if pair is None else self._try_again(now, pair, message.error)

    def carry_failed(self, now: float, name: str, message: CarryFailed) -> Orders:
        """A member has given up; one that was taken for a holder does not hold it."""
        if name in self._members:
            self._members[name].stored = False
        return self.lost(now, name, message.error)

    def look(self, now: float) -> Orders:
        """Leave out who has been silent for too long, and replace hops that stand still."""
        for name, member in self._members.items():
            if self._has_work(name) and now - member.heard > self.stall_limit_s:
                silent = now - member.heard
                return self.lost(now, name, f"nothing heard of it for {silent:.1f} s (relay.stall_limit_s)")
        for upstream, downstream in list(self._hops):
            source, member = self._members[upstream], self._members[downstream]
            has_more = source.stored or source.received > member.received
            if has_more and not member.stored and now - max(member.moved, source.moved) > self.stall_limit_s:
                return self._try_again(now, (upstream, downstream), f"no chunk moved for {now - member.moved:.1f} s")
        return []

    def _has_work(self, name: str) -> bool:
        """Whether its transfer is open, so that it must report."""
        if not self._members[name].stored:
            return True
        return any(up == name and not self._members[down].stored for up, down in self._hops)

    def _try_again(self, now: float, pair: tuple[str, str], reason: str) -> Orders:
        upstream, downstream = pair
        self._hops.pop(pair)
        self._attempts[pair] += 1
        self.repairs += 1
        if self._attempts[pair] >= HOP_ATTEMPTS:
            return self.lost(now, downstream, f"no way to it from {upstream}: {reason}")
        self._members[downstream].moved = now
        return self._arrange(now)

    def _arrange(self, now: float) -> Orders:
        """Give every member that lacks the version an upstream neighbour; orders for those whose neighbours changed."""
        self._find_head()
        names = list(self._members)
        if self.no_source:
            return []
        for upstream, downstream in pairwise(names):
            pair = (upstream, downstream)
            if pair not in self._hops and not self._members[downstream].stored:
                self._hops[pair] = self._new_hop(now, pair)
        wanted = set(pairwise(names))
        self._hops = {pair: hop for pair, hop in self._hops.items() if pair in wanted}
        return [order for name in names if (order := self._order(now, name)) is not None]

    def _find_head(self) -> None:
        """The chain begins with one that holds the version: the first that has it, or one from outside."""
        if all(member.stored for member in self._members.values()):
            return
        first = next(iter(self._members.values()))
        if first.stored:
            return
        holder = next((name for name, member in self._members.items() if member.stored), None)
        if holder is not None:
            source = self._members.pop(holder)
        elif self._spare:
            source = _Member(node=self._spare.pop(next(iter(self._spare))), stored=True)
        else:
            self.no_source = True
            return
        # Who has most goes first: it becomes the master relay, and what it lacks is sent to it alone.
        rest = sorted(self._members.values(), key=lambda member: -member.received)
        self._members = {member.node.name: member for member in (source, *rest)}

    def _new_hop(self, now: float, pair: tuple[str, str]) -> _Hop:
        upstream, downstream = (self._members[name].node for name in pair)
        by_mpi = upstream.world == downstream.world != "" and not self._attempts[pair]
        self._members[pair[1]].moved = now
        return _Hop(epoch=next(self.numbers.epoch), by_mpi=by_mpi)

    def _order(self, now: float, name: str) -> tuple[str, Carry] | None:
        """What a member is to be told, unless it knows it."""
        member = self._members[name]
        upstream = next((pair for pair in self._hops if pair[1] == name), None)
        downstream = next((pair for pair in self._hops if pair[0] == name), None)
        neighbours = (
            None if upstream is None else self._hop_order(upstream, self._members[upstream[0]].node, address=False),
            None if downstream is None else self._hop_order(downstream, self._members[downstream[1]].node),
        )
        if neighbours == member.neighbours or (member.neighbours is None and neighbours == (None, None)):
            return None
        member.neighbours = neighbours
        member.heard = now
        member.order = next(self.numbers.order)
        return name, Carry(
            policy_version=self.policy_version,
            order=member.order,
            upstream=neighbours[0],
            downstream=neighbours[1],
            chunk_bytes=self.chunk_bytes,
            encoding=self.encoding,
            limit_s=max(self.deadline - now, 0.001),
        )

    def _hop_order(self, pair: tuple[str, str], node: Node, *, address: bool = True) -> HopOrder:
        hop = self._hops[pair]
        order = HopOrder(peer=node.name, epoch=hop.epoch, world_rank=node.world_rank if hop.by_mpi else -1, address="")
        return replace(order, address=node.address) if address and not hop.by_mpi else order

"""Carriers of one process, joined by TCP hops, with the test in the controller's place."""

from __future__ import annotations

import itertools
import queue
import resource
import select
import threading
import time
from concurrent.futures import wait

import numpy as np
import pytest

from laminar.errors import UserError
from laminar.protocol.messages import Carry, CarryFailed, HopFailed, HopOrder, WeightsStored
from laminar.weights.checksum import checksum
from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore
from laminar.workers.relay import carrier as carrier_module
from laminar.workers.relay.carrier import Carrier
from laminar.workers.relay.hop import HopError
from laminar.workers.relay.tcp_door import TcpDoor

LAYOUT = WeightLayout.plan([("w", "bfloat16", (1 << 20,))])
CHUNK_BYTES = 1 << 18
CHUNKS = 8
KEY = b"k" * 32
LIMIT_S = 20.0


def contents(version):
    data = np.random.default_rng(0).integers(0, 256, LAYOUT.total_bytes, np.uint8)
    data[:: 1 << 12] += np.uint8(version)
    return data


class Worker:
    """A carrier, its store, and what it has reported."""

    def __init__(self, base, name, **settings):
        self.name = name
        self.events = queue.Queue()
        self.store = WeightStore("run", name, base)
        self.door = TcpDoor("127.0.0.1", KEY)
        settings = {"keep": 2, "door": self.door} | settings
        self.carrier = Carrier(self.store, hop_key=KEY, report=self.events.put, **settings)
        self.address = self.door.address("127.0.0.1")

    def next(self, kind):
        event = self.events.get(timeout=LIMIT_S)
        assert isinstance(event, kind), event
        return event

    def publish(self, version):
        with self.store.begin(version, LAYOUT) as writer:
            writer.buffer[:] = contents(version)
            writer.commit()

    def check(self, version):
        with self.store.open(version) as reader:
            assert np.array_equal(reader.buffer, contents(version))


class Tier:
    """Gives orders as the controller does."""

    def __init__(self, base):
        self.base = base
        self.workers = []
        self.order, self.epoch = itertools.count(1), itertools.count(1)

    def add(self, **settings):
        self.workers.append(Worker(self.base, f"relay-{len(self.workers)}", **settings))
        return self.workers[-1]

    def hop(self, downstream):
        """(as the upstream end is told, as the downstream end is told), names left out."""
        epoch = next(self.epoch)
        return (
            HopOrder(peer=downstream.name, epoch=epoch, world_rank=-1, address=downstream.address),
            HopOrder(peer="upstream", epoch=epoch, world_rank=-1, address=""),
        )

    def tell(self, worker, version, upstream=None, downstream=None, order=None, limit_s=LIMIT_S, encoding="delta"):
        carry = Carry(
            policy_version=version,
            order=next(self.order) if order is None else order,
            upstream=upstream,
            downstream=downstream,
            chunk_bytes=CHUNK_BYTES,
            encoding=encoding,
            limit_s=limit_s,
        )
        worker.carrier.order(carry)
        return carry

    def chain(self, version, *workers, **options):
        hops = [self.hop(worker) for worker in workers[1:]]
        ways = [(None, *[told for _, told in hops]), (*[told for told, _ in hops], None)]
        for worker, upstream, downstream in zip(workers, *ways, strict=True):
            self.tell(worker, version, upstream, downstream, **options)


@pytest.fixture
def tier(shared_memory):
    tier = Tier(shared_memory)
    yield tier
    for worker in tier.workers:
        worker.carrier.close()
    ended = [worker.carrier.ended for worker in tier.workers if not worker.carrier.world.exception()]
    assert not wait(ended, timeout=LIMIT_S).not_done
    for future in ended:
        future.result()
    for worker in tier.workers:
        worker.door.close()


def test_versions_go_down_the_chain_as_deltas_and_old_ones_go(tier):
    workers = [tier.add() for _ in range(3)]
    for version in range(4):
        workers[0].publish(version)
        tier.chain(version, *workers)
        for place, worker in enumerate(workers):
            stored = worker.next(WeightsStored)
            assert (stored.policy_version, stored.nbytes, stored.chunks) == (version, LAYOUT.total_bytes, CHUNKS)
            worker.check(version)
            if place:
                assert 0 < stored.seconds < LIMIT_S
                assert 0 < stored.latency_s < stored.seconds
                assert stored.bytes_per_s > 0
                full = LAYOUT.total_bytes + len(LAYOUT.to_bytes())
                assert stored.received_bytes == full if version == 0 else stored.received_bytes < full / 20
            else:
                assert (stored.seconds, stored.received_bytes) == (0, 0)
        for worker in workers:  # the broadcast is over
            worker.carrier.make_room()
            prepared = list(worker.store.directory.glob(".prepared-*.partial"))
            assert len(prepared) == (0 if worker is workers[0] else 1)  # only where versions are received
    for worker in workers:
        worker.carrier.close()
    wait([worker.carrier.ended for worker in workers], timeout=LIMIT_S)
    assert all(worker.store.versions() == [2, 3] for worker in workers)
    assert all(worker.events.empty() and worker.carrier.progress is None for worker in workers)


def test_the_trainer_is_a_head_without_a_door(tier):
    trainer, relay = tier.add(door=None, keep=1), tier.add()
    trainer.publish(5)
    tier.chain(5, trainer, relay)
    trainer.next(WeightsStored)
    relay.next(WeightsStored)
    relay.check(5)


def test_who_holds_the_version_says_so_at_once_and_serves_later(tier):
    first, second, third = tier.add(), tier.add(), tier.add()
    for worker in (first, second):
        worker.publish(3)
    tier.chain(3, first, second)
    assert first.next(WeightsStored).received_bytes == 0
    assert second.next(WeightsStored).received_bytes == 0
    tier.chain(3, second, third)
    third.next(WeightsStored)
    third.check(3)
    assert second.events.empty()


def test_a_hop_whose_epoch_stays_goes_on_when_the_other_is_replaced(tier):
    """The middle relay's upstream neighbour never comes; another takes its place, by another order."""
    head, middle, tail = tier.add(), tier.add(), tier.add()
    head.publish(1)
    _, never = tier.hop(middle)
    down, up = tier.hop(tail)
    tier.tell(middle, 1, upstream=never, downstream=down)
    tier.tell(tail, 1, upstream=up)
    to_middle, from_head = tier.hop(middle)
    tier.tell(head, 1, downstream=to_middle)
    tier.tell(middle, 1, upstream=from_head, downstream=down)
    for worker in (middle, tail):
        assert worker.next(WeightsStored).damaged == 0
        worker.check(1)


def test_a_lost_neighbour_is_reported_once_and_what_has_come_stays(tier, shared_memory):
    head, middle, tail = tier.add(), tier.add(), tier.add()
    head.publish(1)
    to_middle, from_head = tier.hop(middle)
    to_tail, from_middle = tier.hop(tail)
    tier.tell(tail, 1, upstream=from_middle)
    tier.tell(middle, 1, upstream=from_head, downstream=to_tail)
    tier.tell(head, 1, downstream=to_middle)
    head.carrier.close()  # in the middle of it, or before, or after
    event = middle.events.get(timeout=LIMIT_S)
    if isinstance(event, HopFailed):
        assert (event.policy_version, event.epoch, event.peer) == (1, from_head.epoch, "upstream")
        assert "closed" in event.error or "ECONNRESET" in event.error
        other = tier.add()
        other.publish(1)
        to_middle, from_other = tier.hop(middle)
        tier.tell(other, 1, downstream=to_middle)
        tier.tell(middle, 1, upstream=from_other, downstream=to_tail)
        middle.next(WeightsStored)
    tail.next(WeightsStored)
    tail.check(1)
    assert middle.events.empty()


def test_a_neighbour_that_cannot_be_reached_is_reported_and_the_way_in_goes_on(tier):
    head, middle = tier.add(), tier.add()
    head.publish(1)
    to_middle, from_head = tier.hop(middle)
    nobody = HopOrder(peer="relay-9", epoch=99, world_rank=-1, address="127.0.0.1:1")
    elsewhere = HopOrder(peer="relay-8", epoch=98, world_rank=3, address="")
    tier.tell(head, 1, downstream=to_middle)
    tier.tell(middle, 1, upstream=from_head, downstream=nobody)
    events = [middle.next((HopFailed, WeightsStored)) for _ in range(2)]
    (failed,) = [event for event in events if isinstance(event, HopFailed)]
    assert (failed.epoch, failed.peer) == (99, "relay-9")
    middle.check(1)
    tier.tell(middle, 1, upstream=from_head, downstream=elsewhere)
    assert "no mpirun world" in middle.next(HopFailed).error


def test_an_order_that_comes_late_is_not_obeyed(tier):
    head, tail = tier.add(), tier.add()
    for version in (1, 2):
        head.publish(version)
    tier.chain(2, head, tail, order=7)
    tier.tell(tail, 1, upstream=tier.hop(tail)[1], order=6)
    tier.tell(tail, 1, upstream=tier.hop(tail)[1], order=7)
    assert tail.next(WeightsStored).policy_version == 2
    assert head.next(WeightsStored).policy_version == 2
    tier.chain(1, head, tail, order=8)
    assert tail.next(WeightsStored).policy_version == 1


def test_a_newer_version_displaces_one_under_way_and_nothing_of_it_stays(tier):
    head, tail = tier.add(), tier.add()
    head.publish(2)
    tier.tell(tail, 1, upstream=tier.hop(tail)[1])
    tier.chain(2, head, tail)
    assert tail.next(WeightsStored).policy_version == 2
    assert tail.events.empty()
    assert tail.store.versions() == [2]


def test_who_does_not_hold_the_version_cannot_be_the_head(tier):
    head, tail = tier.add(), tier.add()
    head.publish(1)
    order = tier.tell(head, 9, downstream=tier.hop(tail)[0])
    failed = head.next(CarryFailed)
    assert (failed.policy_version, failed.order) == (9, order.order)
    assert "version 9 is not here to be sent: the store has [1]" in failed.error
    tier.chain(1, head, tail)
    tail.next(WeightsStored)


def test_the_limit_names_the_neighbour_that_did_not_answer(tier):
    head, tail = tier.add(), tier.add()
    head.publish(1)
    down, up = tier.hop(tail)
    tier.tell(tail, 1, upstream=up, limit_s=0.2)
    assert tail.next(CarryFailed).error == "version 1 not carried within 0.2 s: upstream has sent 0 of ? chunks"
    tier.tell(head, 1, downstream=down, limit_s=0.2)
    head.next(WeightsStored)
    assert "within 0.2 s: relay-1 has taken 0 of 8 chunks" in head.next(CarryFailed).error
    tier.chain(1, head, tail)
    tail.next(WeightsStored)
    tail.check(1)


@pytest.mark.parametrize("own_core", [False, True])
def test_a_second_thread_takes_checksums_where_there_is_a_core_for_it(tier, monkeypatch, own_core):
    threads = []

    def take(data):
        threads.append(threading.current_thread().name.partition("_")[0])
        return checksum(data)

    monkeypatch.setattr(carrier_module, "checksum", take)
    head, tail = tier.add(), tier.add(own_core=own_core)
    head.publish(1)
    tier.chain(1, head, tail)
    stored = tail.next(WeightsStored)
    tail.check(1)
    assert threads == ["checksums"] * stored.chunks * own_core


def test_who_has_no_memory_says_so(tier, monkeypatch):
    head, tail = tier.add(), tier.add()
    head.publish(1)

    def begin(policy_version, layout, reserve):
        raise UserError("shared memory too small")

    monkeypatch.setattr(tail.store, "begin", begin)
    tier.chain(1, head, tail)
    assert tail.next(CarryFailed).error == "shared memory too small"
    head.next(WeightsStored)
    head.next(HopFailed)
    monkeypatch.undo()
    tier.chain(1, head, tail)
    tail.next(WeightsStored)


def test_progress_is_there_while_a_transfer_is_open(tier):
    head, tail = tier.add(), tier.add()
    head.publish(1)
    down, up = tier.hop(tail)
    order = tier.tell(head, 1, downstream=down)
    head.next(WeightsStored)
    while (progress := head.carrier.progress) is None:
        pass
    assert (progress.policy_version, progress.order, progress.received, progress.chunks) == (1, order.order, 8, 8)
    assert progress.sent == 0
    tier.tell(tail, 1, upstream=up)
    tail.next(WeightsStored)
    deadline = time.monotonic() + LIMIT_S
    while head.carrier.progress is not None and time.monotonic() < deadline:
        pass
    assert head.carrier.progress is None


def test_a_world_that_cannot_be_joined_is_said(tier):
    def world():
        raise UserError("no MPI")

    worker = tier.add(world_factory=world)
    with pytest.raises(UserError, match="no MPI"):
        worker.carrier.world.result(timeout=LIMIT_S)


def test_a_hop_of_the_world_is_taken_when_the_order_says_so(tier):
    class World:
        rank, size, library, name = 0, 2, "none", "w"

        def settle(self):
            return True

        def hop(self, rank, epoch, peer, place):
            raise HopError(f"asked for rank {rank} in epoch {epoch}")

    worker = tier.add(world_factory=World)
    worker.publish(1)
    tier.tell(worker, 1, downstream=HopOrder(peer="relay-1", epoch=4, world_rank=1, address=""))
    worker.next(WeightsStored)
    assert worker.next(HopFailed).error == "asked for rank 1 in epoch 4"


def test_an_idle_carrier_burns_no_cpu(tier):
    head, tail = tier.add(), tier.add()
    head.publish(1)
    tier.chain(1, head, tail)
    tail.next(WeightsStored)
    while head.carrier.progress is not None or tail.carrier.progress is not None:
        pass
    before = resource.getrusage(resource.RUSAGE_SELF)
    select.select([], [], [], 0.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05

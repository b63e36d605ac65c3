import pytest

from laminar.protocol import messages
from laminar.simulation.workers.modelled_worker import Life
from laminar.simulation.workers.relay_worker import ModelledRelay
from laminar.simulation.workers.weight_stores import WeightStores, WeightTimes
from tests.simulation.worker_bench import Desk, in_virtual_time

TIMES = WeightTimes(nbytes=1_000_000, latency_s=0.01, bandwidth=1e6, pull_s=0.0)  # 1.1 s a version
CHUNK_S = 0.11


class Chain:
    """Relays, and orders for them as the controller would give them."""

    def __init__(self, desk):
        self.desk = desk
        self.relays = {}
        self.order_number = self.epoch = 0
        self.began = 0.0

    def start(self, rank, number=1):
        relay = self.relays[rank] = ModelledRelay(
            self.desk.network,
            Life(index=rank, number=number),
            times=TIMES,
            stores=self.desk.stores,
            carriers=self.desk.carriers,
            keep_versions=2,
        )
        return relay

    async def carry(self, *ranks, version=1, epochs=None, limit_s=60.0, only=None):
        """Order them into a chain; `epochs` of hops that are to stay as they are. Returns the epochs."""
        if epochs is None:
            epochs = [None] * (len(ranks) - 1)
        numbers = []
        for epoch in epochs:
            self.epoch += 1
            numbers.append(self.epoch if epoch is None else epoch)
        for place, rank in enumerate(ranks):
            self.order_number += 1
            if only is None or rank in only:
                await self.desk.tell(
                    self.relays[rank],
                    messages.Carry(
                        policy_version=version,
                        order=self.order_number,
                        upstream=hop(ranks[place - 1], numbers[place - 1]) if place else None,
                        downstream=hop(ranks[place + 1], numbers[place]) if place + 1 < len(ranks) else None,
                        chunk_bytes=100_000,
                        encoding="full",
                        limit_s=limit_s,
                    ),
                )
        self.began = self.desk.loop.time()
        return numbers

    def said(self, kind):
        """(relay, seconds since the last orders) by arrival."""
        return [(peer, round(at - self.began, 3)) for at, peer, message in self.desk.said if isinstance(message, kind)]


def hop(rank, epoch):
    return messages.HopOrder(peer=f"relay-{rank}", epoch=epoch, world_rank=-1, address="there")


async def chain(desk, count):
    made = Chain(desk)
    for rank in range(count):
        made.start(rank)
    await desk.welcome(*made.relays.values())
    desk.stores.put("relay-0", 1, 2)
    return made


@in_virtual_time
async def test_a_version_arrives_hop_by_hop():
    desk = Desk()
    relays = await chain(desk, 4)
    await relays.carry(0, 1, 2, 3)
    await desk.listen(10)
    # (position - 1 + k)(alpha + beta m / k) with k = 10 chunks
    stored = relays.said(messages.WeightsStored)
    assert stored == [("relay-0#1", 0.0), ("relay-1#1", 1.1), ("relay-2#1", 1.21), ("relay-3#1", 1.32)]
    assert desk.stores.held("relay-3") == [1]
    last = desk.said[-1][2]
    assert (last.chunks, last.received_bytes, last.latency_s) == (10, 1_000_000, 0.01)
    assert last.seconds == pytest.approx(1.32)


@in_virtual_time
async def test_progress_is_told_as_long_as_the_transfer_is_open():
    desk = Desk()
    relays = await chain(desk, 3)
    await relays.carry(0, 1, 2)
    await desk.listen(10)
    told = [(peer, m.received) for _, peer, m in desk.said if isinstance(m, messages.CarryProgress)]
    # At 0.25, 0.5, 0.75 and 1 s all three; then relay-0 and later relay-1 have nothing to do any more.
    assert [received for peer, received in told if peer == "relay-1#1"] == [2, 4, 6, 9]
    assert [received for peer, received in told if peer == "relay-2#1"] == [1, 3, 5, 8]
    assert len([1 for peer, _ in told if peer == "relay-0#1"]) == 4


@in_virtual_time
async def test_a_chain_heals_by_new_orders_for_the_two_neighbours():
    desk = Desk()
    relays = await chain(desk, 4)
    epochs = await relays.carry(0, 1, 2, 3)
    await desk.listen(0.5)
    relays.relays[1].kill()
    await desk.listen(0.1)
    assert relays.said(messages.HopFailed) == [("relay-0#1", 0.501), ("relay-2#1", 0.501)]
    await relays.carry(0, 2, 3, epochs=[None, epochs[2]], only=(0, 2))
    await desk.listen(10)
    # relay-2 has 3 chunks and gets the other 7 from relay-0.
    stored = relays.said(messages.WeightsStored)
    assert stored[-2:] == [("relay-2#1", round(7 * CHUNK_S, 3)), ("relay-3#1", round(8 * CHUNK_S, 3))]
    assert len(relays.said(messages.HopFailed)) == 2


@in_virtual_time
async def test_a_relay_that_hangs_is_silent_and_goes_on_where_it_was():
    desk = Desk()
    relays = await chain(desk, 3)
    await relays.carry(0, 1, 2)
    desk.loop.call_later(0.5, relays.relays[1].hang)
    desk.loop.call_later(5.5, relays.relays[1].resume)
    await desk.listen(5)
    assert [at for peer, at in relays.said(messages.CarryProgress) if peer == "relay-1#1"] == [0.25]
    assert relays.said(messages.HopFailed) == []
    await desk.listen(10)
    assert relays.said(messages.WeightsStored)[1:] == [
        ("relay-1#1", round(5.5 + 6 * CHUNK_S, 3)),
        ("relay-2#1", round(5.5 + 7 * CHUNK_S, 3)),
    ]


@in_virtual_time
async def test_what_is_not_there_cannot_be_sent():
    desk = Desk()
    relays = await chain(desk, 2)
    await relays.carry(0, 1, version=7, limit_s=3.0)
    await desk.listen(10)
    assert relays.said(messages.CarryFailed) == [("relay-0#1", 0.0), ("relay-1#1", 3.0)]
    assert desk.stores.held("relay-1") == []


@in_virtual_time
async def test_a_transfer_that_does_not_meet_its_limit_is_given_up_at_it():
    desk = Desk()
    relays = await chain(desk, 2)
    await relays.carry(0, 1, limit_s=0.5)
    await desk.listen(10)
    assert {at for _, at in relays.said(messages.CarryFailed)} == {0.5}
    assert desk.stores.held("relay-1") == []


@in_virtual_time
async def test_another_version_gives_the_transfer_up_and_an_old_order_is_ignored():
    desk = Desk()
    relays = await chain(desk, 2)
    desk.stores.put("relay-0", 2, 2)
    await relays.carry(0, 1, version=1)
    await desk.listen(0.5)
    await relays.carry(0, 1, version=2)
    relays.order_number -= 4
    await relays.carry(0, 1, version=1)
    await desk.listen(10)
    assert desk.stores.held("relay-1") == [2]
    assert relays.said(messages.WeightsStored)[-1] == ("relay-1#1", 1.1)


@in_virtual_time
async def test_a_successor_finds_what_the_store_holds_and_says_so_first():
    desk = Desk()
    relays = await chain(desk, 1)
    relays.relays[0].kill()
    await desk.welcome_and_hear(relays.start(0, number=2))
    joined, ready = (message for _, _, message in desk.said[-2:])
    assert joined.versions == (1,) and joined.world_rank == -1
    assert isinstance(ready, messages.Ready)


def test_a_store_keeps_the_newest_versions_until_its_host_is_lost():
    stores = WeightStores()
    for version in (1, 3, 2, 3):
        stores.put("relay-0", version, 2)
    assert stores.held("relay-0") == [2, 3]
    stores.lose("relay-0")
    assert stores.held("relay-0") == []

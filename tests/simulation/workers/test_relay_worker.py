import pytest

from laminar.protocol import messages
from laminar.simulation.workers.modelled_worker import Life
from laminar.simulation.workers.relay_worker import ModelledRelay, WeightStores, WeightTimes
from tests.simulation.worker_bench import Desk, in_virtual_time

TIMES = WeightTimes(nbytes=1_000_000, latency_s=0.01, bandwidth=1e6, pull_s=0.0)  # 1 s a version


async def chain(desk, count, *, keep=2):
    relays = {}
    for rank in range(count):
        relays[rank] = ModelledRelay(
            desk.network, Life(index=rank), times=TIMES, stores=desk.stores, relays=relays, keep_versions=keep
        )
    await desk.welcome(*relays.values())
    return relays


async def broadcast(desk, relays, version, *, deadline_s=60.0):
    ranks = tuple(relays)
    message = messages.Broadcast(
        policy_version=version, chain=ranks, chunk_bytes=100_000, epoch=1, deadline_s=deadline_s
    )
    for rank in ranks:
        await desk.tell(relays[rank], message)
    return desk.loop.time()


@in_virtual_time
async def test_a_version_arrives_hop_by_hop():
    desk = Desk()
    relays = await chain(desk, 4)
    desk.stores.put("relay-0", 1, 2)
    started = await broadcast(desk, relays, 1)
    await desk.listen(10)
    arrivals = {peer: round(at - started, 6) for at, peer, _ in desk.said}
    # (position - 1 + k)(alpha + beta m / k) with k = 10 chunks
    assert arrivals == {"relay-0#1": 0, "relay-1#1": 1.1, "relay-2#1": 1.21, "relay-3#1": 1.32}
    assert all(isinstance(message, messages.WeightsStored) and message.chunks == 10 for _, _, message in desk.said)
    assert desk.stores.held("relay-3") == [1]


@in_virtual_time
async def test_a_dead_relay_fails_those_behind_it_only():
    desk = Desk()
    relays = await chain(desk, 4)
    desk.stores.put("relay-0", 1, 2)
    started = await broadcast(desk, relays, 1)
    desk.loop.call_at(started + 1.15, relays[1].kill)
    await desk.listen(10)
    outcomes = {peer: type(message) for _, peer, message in desk.said}
    assert outcomes == {
        "relay-0#1": messages.WeightsStored,
        "relay-1#1": messages.WeightsStored,
        "relay-2#1": messages.BroadcastFailed,
        "relay-3#1": messages.BroadcastFailed,
    }
    assert desk.stores.held("relay-1") == desk.stores.held("relay-2") == []


@in_virtual_time
async def test_a_broadcast_of_what_the_first_does_not_hold_fails():
    desk = Desk()
    relays = await chain(desk, 2)
    await broadcast(desk, relays, 1)
    assert [type(message) for message in await desk.listen(10)] == [messages.BroadcastFailed] * 2


@in_virtual_time
async def test_a_broadcast_that_cannot_meet_its_deadline_fails_at_it():
    desk = Desk()
    relays = await chain(desk, 2)
    desk.stores.put("relay-0", 1, 2)
    started = await broadcast(desk, relays, 1, deadline_s=0.5)
    await desk.listen(10)
    at, _, message = desk.said[-1]
    assert at - started == pytest.approx(0.5) and isinstance(message, messages.BroadcastFailed)
    assert desk.stores.held("relay-1") == []


def test_a_store_keeps_the_newest_versions_while_its_relay_lives():
    stores = WeightStores()
    stores.put("relay-0", 1, 2)
    assert stores.held("relay-0") == []
    stores.create("relay-0")
    for version in (1, 3, 2, 3):
        stores.put("relay-0", version, 2)
    assert stores.held("relay-0") == [2, 3]
    stores.remove("relay-0")
    assert stores.held("relay-0") == []

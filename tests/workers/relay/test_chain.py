from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from laminar.errors import UserError
from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore
from laminar.workers.relay.chain import POSTED_AHEAD, ChainTransfer, TransferError

LAYOUT = WeightLayout.plan([("a", "uint8", (1000,)), ("b", "float32", (77,))])


class Request:
    def __init__(self, memory):
        self.memory = memory
        self.complete = False

    def test(self):
        return self.complete


class Wire:
    """Both ends of one hop: sends and receives are matched in order, by the test."""

    def __init__(self, name):
        self.peer = name
        self.sends: deque[Request] = deque()
        self.receives: deque[Request] = deque()
        self.carried = 0
        self.abandoned = 0

    def send(self, data):
        self.sends.append(Request(data))
        return self.sends[-1]

    def receive(self, into):
        self.receives.append(Request(into))
        return self.receives[-1]

    def abandon(self):
        self.abandoned += 1

    def carry(self, damage=None):
        """Carry one message if both ends wait for it."""
        if not (self.sends and self.receives):
            return
        source, target = self.sends.popleft(), self.receives.popleft()
        assert source.memory.nbytes == target.memory.nbytes
        target.memory[:] = source.memory
        if damage is not None and damage == self.carried:
            target.memory.view(np.uint8)[0] ^= 1
        self.carried += 1
        source.complete = target.complete = True


@pytest.fixture
def stores(shared_memory):
    return [WeightStore("run", f"relay-{index}", shared_memory) for index in range(4)]


def fill(store, version=1):
    writer = store.begin(version, LAYOUT)
    writer.buffer[:] = np.random.default_rng(0).integers(0, 256, LAYOUT.total_bytes, np.uint8)
    writer.commit()


def chain(stores, **changes):
    wires = [Wire(f"relay {index}") for index in range(len(stores) - 1)]
    settings = {"policy_version": 1, "epoch": 5, "chunk_bytes": 100} | changes
    transfers = [
        ChainTransfer(store=store, upstream=upstream, downstream=downstream, **settings)
        for store, upstream, downstream in zip(stores, [None, *wires], [*wires, None], strict=True)
    ]
    return wires, transfers


def drive(wires, transfers, damage=None, limit=10_000):
    for _ in range(limit):
        if all(transfer.done for transfer in transfers):
            return
        for transfer in transfers:
            transfer.advance()
        for index, wire in enumerate(wires):
            wire.carry(damage[1] if damage and damage[0] == index else None)
    raise AssertionError([transfer.waiting_for() for transfer in transfers])


def test_every_store_gets_the_same_bytes(stores):
    fill(stores[0])
    wires, transfers = chain(stores)
    drive(wires, transfers)
    for store, transfer in zip(stores, transfers, strict=True):
        assert transfer.stored
        with store.open(1) as reader, stores[0].open(1) as first:
            assert reader.layout == LAYOUT
            assert np.array_equal(reader.buffer, first.buffer)
    assert transfers[3].nbytes == LAYOUT.total_bytes
    assert len(transfers[3].spans) == -(-LAYOUT.total_bytes // 100)


def test_a_version_without_bytes_arrives(stores):
    stores[0].begin(1, WeightLayout.plan([])).commit()
    wires, transfers = chain(stores)
    drive(wires, transfers)
    assert stores[3].versions() == [1]


def test_chunks_are_forwarded_before_the_version_is_complete(stores):
    fill(stores[0])
    wires, transfers = chain(stores[:3])
    while wires[1].carried < 4:  # header, layout, and the first chunk's head and bytes
        for transfer in transfers:
            transfer.advance()
        for wire in wires:
            wire.carry()
    assert not transfers[1].stored


def test_receives_are_posted_ahead_and_bounded(stores):
    fill(stores[0])
    (wire,), (head, tail) = chain(stores[:2])
    for _ in range(4):
        head.advance(), tail.advance(), wire.carry()
    for _ in range(50):
        head.advance(), tail.advance()
    assert len(wire.receives) == len(wire.sends) == 2 * POSTED_AHEAD


def test_the_files_memory_is_the_message_buffer(stores):
    fill(stores[0])
    (wire,), (head, tail) = chain(stores[:2])
    while wire.carried < 2 or not (wire.sends and wire.receives):
        head.advance(), tail.advance()
        if wire.carried < 2:
            wire.carry()
    assert np.shares_memory(wire.sends[1].memory, head._buffer)
    assert np.shares_memory(wire.receives[1].memory, tail._writer.buffer)


@pytest.mark.parametrize("chunk", [0, 7])
def test_a_damaged_chunk_is_noticed_and_nothing_becomes_visible(stores, chunk):
    fill(stores[0])
    wires, transfers = chain(stores[:3])
    message = 2 + 2 * chunk + 1  # after header and layout: head, bytes, head, bytes, ...
    with pytest.raises(TransferError, match=f"chunk {chunk} of 14 from relay 0 is damaged"):
        drive(wires, transfers, damage=(0, message))
    for transfer in transfers:
        transfer.close()
    assert wires[1].carried <= 2 + 2 * chunk  # not forwarded
    assert stores[1].versions() == stores[2].versions() == []
    assert list(stores[1].directory.iterdir()) == []
    assert wires[0].abandoned == 2


@pytest.mark.parametrize(
    ("message", "text"), [(0, "carries something else"), (1, "layout from relay 0 is damaged"), (4, "chunk 1 of 14")]
)
def test_a_damaged_header_layout_or_chunk_head_is_noticed(stores, message, text):
    fill(stores[0])
    wires, transfers = chain(stores[:2])
    with pytest.raises(TransferError, match=text):
        drive(wires, transfers, damage=(0, message))


@pytest.mark.parametrize("change", [{"epoch": 6}, {"policy_version": 2}, {"chunk_bytes": 99}])
def test_a_neighbour_in_another_broadcast_is_noticed(stores, change):
    fill(stores[0])
    (wire,), (head, _) = chain(stores[:2])
    other = ChainTransfer(
        store=stores[1],
        upstream=wire,
        downstream=None,
        **({"policy_version": 1, "epoch": 5, "chunk_bytes": 100} | change),
    )
    with pytest.raises(TransferError, match="relay 0 carries something else"):
        drive([wire], [head, other])


def test_the_head_must_hold_the_version(stores):
    with pytest.raises(TransferError, match="does not hold version 1"):
        chain(stores)


def test_a_receiver_that_holds_the_version_says_so(stores):
    fill(stores[0])
    fill(stores[1])
    with pytest.raises(FileExistsError, match="version 1 is already in the store"):
        drive(*chain(stores[:2]))


def test_a_receiver_without_memory_says_so(stores, monkeypatch):
    fill(stores[0])

    def begin(policy_version, layout):
        raise UserError("shared memory too small")

    monkeypatch.setattr(stores[1], "begin", begin)
    with pytest.raises(UserError, match="too small"):
        drive(*chain(stores[:2]))


def test_who_is_waited_for(stores):
    fill(stores[0])
    wires, transfers = chain(stores[:3])
    assert transfers[1].waiting_for() == "relay 0 has sent 0 of ? chunks, relay 1 has taken 0 of ? chunks"
    for _ in range(40):
        for transfer in transfers:
            transfer.advance()
        wires[0].carry()
    assert transfers[1].waiting_for() == "relay 1 has taken 0 of 14 chunks"


@pytest.mark.parametrize("chunk_bytes", [0, -1, 1 << 31])
def test_the_chunk_size_has_bounds(stores, chunk_bytes):
    fill(stores[0])
    with pytest.raises(TransferError, match="expected 1 to"):
        chain(stores, chunk_bytes=chunk_bytes)

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import UserError
from laminar.weights.checksum import checksum
from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore
from laminar.weights.version_file import VersionWriter
from laminar.workers.relay.hop import FULL, FrameHead, FrameKind, HopError
from laminar.workers.relay.receiver import MAX_DAMAGED
from laminar.workers.relay.sender import WINDOW
from laminar.workers.relay.transfer import Transfer
from laminar.workers.relay.want import Want
from tests.workers.relay.memory_hop import memory_hops

LAYOUT = WeightLayout.plan([("a", "bfloat16", (2000,)), ("b", "float32", (77,))])
CHUNK_BYTES = 200
CHUNKS = -(-LAYOUT.total_bytes // CHUNK_BYTES)


def contents(version):
    """Bytes of a version: one that differs from the others by little."""
    data = np.random.default_rng(0).integers(0, 256, LAYOUT.total_bytes, np.uint8)
    for changed in range(1, version + 1):
        data[np.random.default_rng(changed).integers(0, LAYOUT.total_bytes, 30)] += 1
    return data


def fill(store, version, data=None):
    writer = store.begin(version, LAYOUT)
    writer.buffer[:] = contents(version) if data is None else data
    writer.commit()


class Relay:
    """A store and the transfer of version 5 through it."""

    def __init__(self, base, index, holds=(), chunk_bytes=CHUNK_BYTES):
        self.name = f"relay-{index}"
        self.store = WeightStore("run", self.name, base)
        for version in holds:
            fill(self.store, version)
        self.transfer = Transfer(store=self.store, policy_version=5, chunk_bytes=chunk_bytes)

    def losses(self):
        lost = [(side, str(error)) for side, error in self.transfer.lost]
        self.transfer.lost.clear()
        return lost

    def check(self):
        """Nothing is visible that is not right, and what counts as received is right."""
        if 5 in self.store.versions():
            with self.store.open(5) as reader:
                assert np.array_equal(reader.buffer, contents(5))
            return
        table = self.transfer.version.table
        for index in np.flatnonzero(table.checked):
            start, stop = table.spans[index]
            assert np.array_equal(self.transfer.version.memory((start, stop)), contents(5)[start:stop])


def link(upstream, downstream, *, delta=True):
    """A new hop from one relay to another; its two ends."""
    ends = []

    def open_upstream(place):
        ends.extend(memory_hops(place, lambda head: ends[2](head), upstream=upstream.name, downstream=downstream.name))
        return ends[0]

    def open_downstream(place):
        ends.append(place)
        return ends[1]

    upstream.transfer.set_downstream(open_upstream, delta=delta)
    downstream.transfer.set_upstream(open_downstream, delta=delta)
    return ends[0], ends[1]


def chain(base, *holdings, delta=True):
    """Relays that hold these versions, linked one after another, and the ends of their hops."""
    relays = [Relay(base, index, holds) for index, holds in enumerate(holdings)]
    return relays, [link(a, b, delta=delta) for a, b in pairwise(relays)]


def drive(relays, limit=3000):
    for now in range(limit):
        if all(relay.transfer.done for relay in relays):
            break
        for relay in relays:
            relay.transfer.advance(float(now))
    else:
        raise AssertionError([relay.transfer.waiting_for() for relay in relays])
    for relay in relays:
        relay.check()
        assert relay.losses() == []


def chunk_heads(end):
    return [head for head in end.sent_heads if head.kind is FrameKind.CHUNK]


def test_every_relay_gets_the_same_bytes(shared_memory):
    relays, ends = chain(shared_memory, [5], [], [], [])
    drive(relays)
    for relay in relays[1:]:
        transfer = relay.transfer
        assert transfer.stored
        assert transfer.chunks == transfer.received == CHUNKS
        assert transfer.reception.nbytes == LAYOUT.total_bytes + len(LAYOUT.to_bytes())
        assert transfer.reception.damaged == 0
        assert transfer.reception.latency_s > 0
        assert transfer.reception.bytes_per_s > 0
        assert relay.store.open(5).layout == LAYOUT
    assert [relay.transfer.sent for relay in relays] == [CHUNKS, CHUNKS, CHUNKS, 0]
    assert all(head.base == FULL for upstream, _ in ends for head in chunk_heads(upstream))


def test_a_version_without_bytes_arrives(shared_memory):
    relays = [Relay(shared_memory, index) for index in range(2)]
    relays[0].store.begin(5, WeightLayout.plan([])).commit()
    relays[0].transfer = Transfer(store=relays[0].store, policy_version=5, chunk_bytes=CHUNK_BYTES)
    link(*relays)
    for now in range(100):
        for relay in relays:
            relay.transfer.advance(float(now))
    assert all(relay.transfer.done for relay in relays)
    assert relays[1].store.versions() == [5]


def test_chunks_are_forwarded_before_the_version_is_complete(shared_memory):
    relays, _ends = chain(shared_memory, [5], [], [])
    for now in range(1000):
        for relay in relays:
            relay.transfer.advance(float(now))
        if relays[2].transfer.received:
            break
    assert relays[2].transfer.received > 0
    assert not relays[1].transfer.stored
    drive(relays)


def test_the_files_memory_is_received_into_and_sent_from(shared_memory):
    (head, tail), (ends,) = chain(shared_memory, [5], [])
    sent, placed = [], []
    send, place = ends[0].send, ends[1].place

    def recording_send(frame, payload=None):
        sent.append((frame, payload))
        send(frame, payload)

    def recording_place(frame):
        placed.append((frame, place(frame)))
        return placed[-1][1]

    ends[0].send, ends[1].place = recording_send, recording_place
    for now in range(30):
        head.transfer.advance(now), tail.transfer.advance(now)
    chunks = [(frame, memory) for frame, memory in sent + placed if frame.kind is FrameKind.CHUNK]
    assert len(chunks) > 4
    for frame, memory in chunks:
        owner = head if any(memory is given for _, given in sent) else tail
        whole = owner.transfer.version.memory((0, LAYOUT.total_bytes))
        assert memory.ctypes.data == whole.ctypes.data + frame.index * CHUNK_BYTES


def test_what_waits_at_a_hop_is_bounded(shared_memory):
    (head, tail), (ends,) = chain(shared_memory, [5], [])
    while head.transfer.sent == 0:
        head.transfer.advance(0.0), tail.transfer.advance(0.0)
    for _ in range(50):
        head.transfer.advance(0.0)
    assert ends[0].unsent == WINDOW


def test_deltas_are_made_once_and_forwarded_as_they_are(shared_memory):
    relays, ends = chain(shared_memory, [3, 4, 5], [3, 4], [4], [3, 4])
    drive(relays)
    first, *others = [
        [(head.index, head.base, head.checksum) for head in chunk_heads(upstream)] for upstream, _ in ends
    ]
    assert all(sorted(other) == sorted(first) for other in others)
    assert {base for _, base, _ in first} <= {4, FULL}
    assert sum(base == 4 for _, base, _ in first) > CHUNKS / 2
    assert relays[1].transfer.reception.nbytes < LAYOUT.total_bytes


def test_deltas_are_sent_only_when_asked_for(shared_memory):
    relays, ends = chain(shared_memory, [4, 5], [4], delta=False)
    drive(relays)
    assert all(head.base == FULL for head in chunk_heads(ends[0][0]))


def test_a_relay_without_the_base_in_the_middle_gets_all_and_sends_what_it_can(shared_memory):
    relays, ends = chain(shared_memory, [4, 5], [], [3, 4], [3, 4])
    drive(relays)
    assert all(head.base == FULL for upstream, _ in ends[:2] for head in chunk_heads(upstream))
    assert any(head.base == 4 for head in chunk_heads(ends[2][0]))


def test_a_base_that_differs_is_noticed_and_the_chunk_comes_in_full(shared_memory):
    relays, ends = chain(shared_memory, [4, 5], [])
    other = contents(4)
    other[::CHUNK_BYTES] ^= 1
    fill(relays[1].store, 4, other)
    drive(relays)
    heads = chunk_heads(ends[0][0])
    assert sum(head.base == 4 for head in heads) == relays[1].transfer.reception.damaged > 0
    assert sum(head.base == FULL for head in heads) == CHUNKS


def test_a_base_that_retention_removes_meanwhile_still_serves(shared_memory):
    relays, ends = chain(shared_memory, [4, 5], [4])
    while relays[1].transfer.received < 3:
        for relay in relays:
            relay.transfer.advance(0.0)
    for relay in relays:
        relay.store.path(4).unlink()
    drive(relays)
    assert relays[1].transfer.reception.damaged == 0
    assert {head.base for head in chunk_heads(ends[0][0])} >= {4}


@pytest.mark.parametrize("holds", [[], [4]])
def test_a_damaged_chunk_is_counted_and_asked_for_again(shared_memory, holds):
    relays, ends = chain(shared_memory, [4, 5], holds, holds)
    damaged = set()

    def damage(head, memory):
        if head.kind is FrameKind.CHUNK and head.index in (3, 7) and head.index not in damaged:
            damaged.add(head.index)
            memory[-1] ^= 1

    ends[0][1].damage = damage
    drive(relays)
    assert relays[1].transfer.reception.damaged == 2
    assert len(chunk_heads(ends[0][0])) == CHUNKS + 2
    assert relays[2].transfer.reception.damaged == 0
    assert len(chunk_heads(ends[1][0])) == CHUNKS


def test_a_chunk_that_is_damaged_every_time_costs_the_hop_and_no_more(shared_memory):
    relays, ends = chain(shared_memory, [5], [], [])

    def damage(head, memory):
        if head.kind is FrameKind.CHUNK and head.index == 3:
            memory[0] ^= 1

    ends[0][1].damage = damage
    for now in range(300):
        for relay in relays:
            relay.transfer.advance(float(now))
    assert relays[1].losses() == [
        ("upstream", f"relay-0: chunk 3 of version 5 came damaged {MAX_DAMAGED + 1} times"),
    ]
    assert relays[0].losses()[0][0] == "downstream"
    assert relays[2].losses() == []
    assert relays[1].store.versions() == relays[2].store.versions() == []
    received = relays[2].transfer.received
    assert received > 3
    upstream, _ = link(relays[0], relays[1])
    drive(relays)
    assert len(chunk_heads(upstream)) <= CHUNKS - received
    assert len(chunk_heads(ends[1][0])) == CHUNKS


@pytest.mark.parametrize("kind", [FrameKind.WANT, FrameKind.LAYOUT])
def test_a_damaged_question_or_layout_does_no_harm(shared_memory, kind):
    relays, ends = chain(shared_memory, [5], [])
    damaged = []

    def damage(head, memory):
        if head.kind is kind and not damaged:
            damaged.append(head)
            memory[-1] ^= 1

    for end in ends[0]:
        end.damage = damage
    for now in range(300):
        for relay in relays:
            relay.transfer.advance(float(now))
    assert damaged
    if relays[0].losses():
        relays[1].losses()
        link(*relays)
    drive(relays)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"policy_version": 4}, "of version 4"),
        ({"index": 4_000_000}, "chunk 4000000"),
        ({"kind": FrameKind.WANT}, "sends WANT"),
        ({"kind": FrameKind.DONE}, "sends DONE"),
    ],
)
def test_a_neighbour_that_sends_something_else_is_lost(shared_memory, change, text):
    relays, ends = chain(shared_memory, [5], [])
    send = ends[0][0].send

    def other(head, payload=None):
        send(dataclasses.replace(head, **change) if head.kind is FrameKind.CHUNK else head, payload)

    ends[0][0].send = other
    for now in range(50):
        for relay in relays:
            relay.transfer.advance(float(now))
    ((side, error),) = relays[1].losses()
    assert side == "upstream"
    assert text in error
    assert not relays[1].transfer.stored


def test_a_chunk_that_comes_twice_never_overwrites_a_good_one(shared_memory):
    relays, ends = chain(shared_memory, [5], [])
    send = ends[0][0].send

    def twice(head, payload=None):
        send(head, payload)
        if head.kind is FrameKind.CHUNK:
            send(head, ~payload)
            send(head, payload)

    ends[0][0].send = twice
    drive(relays)
    assert relays[1].transfer.reception.damaged == 0


def test_a_lost_upstream_neighbour_is_replaced_and_nothing_is_sent_twice(shared_memory):
    relays = [Relay(shared_memory, 0, [5]), Relay(shared_memory, 1), Relay(shared_memory, 2)]
    spare = Relay(shared_memory, 9, [5])
    _, tail_end = link(relays[0], relays[1])
    link(relays[1], relays[2])
    while relays[1].transfer.received < 6:
        for relay in relays:
            relay.transfer.advance(0.0)
    tail_end.lose()
    for _ in range(5):
        for relay in relays[1:]:
            relay.transfer.advance(0.0)
    assert relays[1].losses() == [("upstream", "relay-0 is lost: it has died")]
    received = relays[1].transfer.received
    assert received >= 6
    upstream, _ = link(spare, relays[1])
    drive([spare, *relays[1:]])
    assert len(chunk_heads(upstream)) == CHUNKS - received
    assert not any(head.kind is FrameKind.LAYOUT and head.nbytes for head in upstream.sent_heads)


def test_a_relay_that_holds_the_version_says_so_and_serves(shared_memory):
    relays, ends = chain(shared_memory, [5], [5], [])
    drive(relays)
    assert [head.kind for head in ends[0][1].sent_heads] == [FrameKind.DONE]
    assert chunk_heads(ends[0][0]) == []
    assert len(chunk_heads(ends[1][0])) == CHUNKS


def test_after_the_end_another_neighbour_is_served(shared_memory):
    relays, _ = chain(shared_memory, [5], [])
    drive(relays)
    late = Relay(shared_memory, 7)
    relays[1].transfer.set_upstream(None)
    link(relays[1], late)
    assert not relays[1].transfer.done
    drive([relays[1], late])


@pytest.mark.parametrize("chunk_bytes", [96, 1000, 1 << 20])
def test_the_sender_follows_the_receivers_chunk_size(shared_memory, chunk_bytes):
    """One that is not complete itself does so as soon as it is."""
    relays = [Relay(shared_memory, 0, [4, 5]), Relay(shared_memory, 1), Relay(shared_memory, 2, [4], chunk_bytes)]
    link(relays[0], relays[1])
    upstream, _ = link(relays[1], relays[2])
    drive(relays)
    assert {head.index for head in chunk_heads(upstream)} == set(range(-(-LAYOUT.total_bytes // chunk_bytes)))


def test_a_neighbour_with_another_layout_of_the_version_is_refused(shared_memory):
    relays, _ends = chain(shared_memory, [5], [])
    while relays[1].transfer.received < 3:
        for relay in relays:
            relay.transfer.advance(0.0)
    other = Relay(shared_memory, 8)
    with other.store.begin(5, WeightLayout.plan([("a", "uint8", (LAYOUT.total_bytes,))])) as writer:
        writer.commit()
    other.transfer = Transfer(store=other.store, policy_version=5, chunk_bytes=CHUNK_BYTES)
    link(other, relays[1])
    for _ in range(20):
        other.transfer.advance(0.0), relays[1].transfer.advance(0.0)
    assert other.losses() == [("downstream", "relay-1 has another layout of version 5")]


def test_a_relay_without_memory_says_so_and_leaves_nothing(shared_memory, monkeypatch):
    relays, _ = chain(shared_memory, [5], [])

    def begin(policy_version, layout, reserve):
        raise UserError("shared memory too small")

    monkeypatch.setattr(relays[1].store, "begin", begin)
    with pytest.raises(UserError, match="too small"):
        drive(relays)


def test_memory_that_ends_on_the_way_is_said_and_leaves_nothing(shared_memory, monkeypatch):
    """It is reserved as chunks come: somebody else may have taken it meanwhile."""
    relays, _ = chain(shared_memory, [5], [])
    asked = []

    def reserve(writer, stop):
        asked.append(stop)
        if stop > 4 * CHUNK_BYTES:
            raise UserError("shared memory too small")

    monkeypatch.setattr(VersionWriter, "reserve", reserve)
    with pytest.raises(UserError, match="too small"):
        drive(relays)
    assert asked[0] == CHUNK_BYTES
    relays[1].transfer.close()
    assert list(relays[1].store.directory.iterdir()) == []


def test_a_chunk_counts_when_its_checksum_is_known(shared_memory):
    """Taken by another thread, it comes later; the chunk is passed on then, and a damaged one is asked for again."""
    relays, ends = chain(shared_memory, [5], [], [])
    asked = []

    def take_checksum(data):
        asked.append((data, Future()))
        return asked[-1][1]

    relays[1].transfer = Transfer(
        store=relays[1].store, policy_version=5, chunk_bytes=CHUNK_BYTES, take_checksum=take_checksum
    )
    ends = [link(a, b) for a, b in pairwise(relays)]
    for now in range(30):
        for relay in relays:
            relay.transfer.advance(float(now))
    assert len(asked) == CHUNKS and relays[1].transfer.received == 0 and chunk_heads(ends[1][0]) == []
    for index, (data, taken) in enumerate(asked[:]):
        taken.set_result(checksum(data) + (index == 3))
    for now in range(30, 60):
        for relay in relays:
            relay.transfer.advance(float(now))
    assert relays[1].transfer.received == CHUNKS - 1 and len(asked) == CHUNKS + 1
    asked[-1][1].set_result(checksum(asked[-1][0]))
    drive(relays)
    assert relays[1].transfer.reception.damaged == 1
    assert [head.index for head in chunk_heads(ends[0][0])] == [*range(CHUNKS), 3]


def test_what_is_given_up_leaves_nothing(shared_memory):
    relays, ends = chain(shared_memory, [5], [])
    while relays[1].transfer.received < 3:
        for relay in relays:
            relay.transfer.advance(0.0)
    relays[1].transfer.close()
    assert list(relays[1].store.directory.iterdir()) == []
    assert ends[0][1].closed


def test_what_a_closed_hop_writes_late_is_found_before_the_commit(shared_memory):
    relays, ends = chain(shared_memory, [5], [])
    head, tail = relays
    while tail.transfer.received < 3:
        head.transfer.advance(0.0), tail.transfer.advance(0.0)
    late = FrameHead(kind=FrameKind.CHUNK, policy_version=5, index=CHUNKS - 2, nbytes=CHUNK_BYTES)
    memory = ends[0][1].place(late)  # it is arriving, as far as the old hop knows
    link(head, tail)[1].frames_per_advance = 1
    while tail.transfer.version.table.missing > 1:
        head.transfer.advance(0.0), tail.transfer.advance(0.0)
    memory[5] ^= 1
    drive(relays)
    assert tail.transfer.reception.damaged == 1


def test_who_is_waited_for(shared_memory):
    relays, _ = chain(shared_memory, [5], [], [])
    assert relays[1].transfer.waiting_for() == "relay-0 has sent 0 of ? chunks, relay-2 has taken 0 of ? chunks"
    relays[1].transfer.set_upstream(None)
    assert "no upstream neighbour has sent 0 of ? chunks" in relays[1].transfer.waiting_for()
    assert relays[0].transfer.waiting_for() == f"relay-1 has taken 0 of {CHUNKS} chunks"


@pytest.mark.parametrize("chunk_bytes", [0, -1, 1 << 31])
def test_the_chunk_size_has_bounds(shared_memory, chunk_bytes):
    with pytest.raises(ValueError, match="expected 1 to"):
        Relay(shared_memory, 0, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 1000])
def test_a_want_comes_back_as_it_was(count):
    chunks = np.random.default_rng(count).integers(0, 2, count).astype(bool)
    want = Want(chunk_bytes=7, layout_checksum=2**64 - 1, chunks=chunks, bases=(3, 4))
    again = Want.unpack(want.pack(), "relay-1")
    assert np.array_equal(again.chunks, chunks)
    assert (again.chunk_bytes, again.layout_checksum, again.bases) == (7, 2**64 - 1, (3, 4))


@given(st.binary(max_size=40))
def test_a_want_of_nonsense_is_a_lost_neighbour(data):
    try:
        Want.unpack(np.frombuffer(data, np.uint8), "relay-1")
    except HopError as error:
        assert "relay-1 wants nonsense" in str(error)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 4), st.integers(1, 6)),
        st.tuples(st.just("link"), st.integers(0, 4), st.integers(1, 4)),
        st.tuples(st.just("lose"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("unlink"), st.integers(0, 4), st.booleans()),
        st.tuples(st.just("damage"), st.integers(0, 30), st.integers(0, 2**32)),
        st.tuples(st.just("delta"), st.booleans(), st.none()),
    ),
    max_size=80,
)


@settings(max_examples=60)
@given(
    actions=ACTIONS,
    holdings=st.lists(st.sampled_from([(), (3,), (4,), (3, 4)]), min_size=4, max_size=4),
    keeps=st.integers(0, 3000),
)
def test_whatever_happens_no_wrong_byte_becomes_visible_and_in_the_end_all_have_the_version(
    tmp_path_factory, actions, holdings, keeps
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("laminar.workers.relay.carried_version.MAX_KEPT_BYTES", keeps)
        live_through(tmp_path_factory.mktemp("stores"), actions, holdings)


def live_through(base, actions, holdings):
    relays = [Relay(base, index, holds) for index, holds in enumerate([(3, 4, 5), *holdings])]
    ends, delta, now = [], True, 0.0
    for action, first, second in actions:
        match action:
            case "step":
                for _ in range(second):
                    now += 1.0
                    relays[first].transfer.advance(now)
            case "link" if first != second:
                ends += link(relays[first], relays[second], delta=delta)
            case "lose" if ends:
                ends[first % len(ends)].lose()
            case "unlink":
                set_side = relays[first].transfer.set_upstream if second else relays[first].transfer.set_downstream
                set_side(None)
            case "damage" if ends:
                damage_once(ends[first % len(ends)], second)
            case "delta":
                delta = first
        for relay in relays:
            relay.check()
    for relay in relays:
        relay.transfer.set_upstream(None)
        relay.transfer.set_downstream(None)
        relay.losses()
    for upstream, downstream in pairwise(relays):
        link(upstream, downstream, delta=delta)
    drive(relays)
    for relay in relays:
        assert checksum(relay.store.open(5).buffer) == checksum(contents(5))
        relay.transfer.close()


def damage_once(end, seed):
    def damage(head, memory):
        memory[seed % memory.size] ^= 1 + seed % 255
        end.damage = None

    end.damage = damage

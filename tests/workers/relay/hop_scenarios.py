"""What the two ends of any hop must do. Each scenario is a pair of generators, one per end, that yield instead of waiting.

`test_hops.py` steps both in one process over TCP; `hop_driver.py` runs one per rank of an mpirun world. The ends speak
to each other through hops alone: `end.open(epoch, place)` gives one, `end.settled()` is true when nothing of those that
were closed is left.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from laminar.workers.relay.hop import HEAD_BYTES, FrameHead, FrameKind, HopError

SIZES = (0, 1, 3, 4097, (1 << 20) + 7, 8 << 20, 0, 5)


def content(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def chunk(index, nbytes):
    return FrameHead(
        kind=FrameKind.CHUNK, policy_version=3, index=index, nbytes=nbytes, base=2, result_checksum=1 << 63
    )


class Places:
    """A `place` that remembers what it gave."""

    def __init__(self):
        self.given = []

    def __call__(self, head):
        self.given.append(np.empty(head.nbytes, np.uint8))
        return self.given[-1]


def get(hop):
    while (frame := hop.receive()) is None:
        hop.advance()
        yield
    return frame


def flush(hop):
    while hop.unsent:
        hop.advance()
        yield


def until_lost(hop):
    while True:
        try:
            hop.advance()
        except HopError as error:
            return str(error)
        assert hop.receive() is None
        yield


def handshake(hop):
    """Both ends are there."""
    hop.send(FrameHead(kind=FrameKind.WANT, policy_version=0))
    head, _ = yield from get(hop)
    assert head.kind == FrameKind.WANT
    yield from flush(hop)


def send_all(hop, seed):
    payloads = [content(seed + index, nbytes) for index, nbytes in enumerate(SIZES)]
    for index, payload in enumerate(payloads):
        hop.send(chunk(index, payload.nbytes), payload if payload.nbytes else None)
    assert hop.unsent == len(SIZES)
    yield from flush(hop)
    for payload in payloads:
        payload[:] = 0xFF  # ours again: the other end must not see it


def receive_all(hop, places, seed):
    for index, nbytes in enumerate(SIZES):
        head, memory = yield from get(hop)
        assert head == chunk(index, nbytes)
        assert np.array_equal(memory, content(seed + index, nbytes))
        if nbytes:
            assert memory is places.given.pop(0)


def there_and_back(end, *, first):
    places = Places()
    hop = end.open(1, places)
    if first:
        yield from send_all(hop, 100)
        yield from receive_all(hop, places, 200)
    else:
        yield from receive_all(hop, places, 100)
        yield from send_all(hop, 200)
    yield from handshake(hop)
    hop.close()


def both_ways_at_once(end, *, first):
    places = Places()
    hop = end.open(1, places)
    mine, theirs = (100, 200) if first else (200, 100)
    sending, receiving = send_all(hop, mine), receive_all(hop, places, theirs)
    running = [sending, receiving]
    while running:
        for steps in tuple(running):
            try:
                next(steps)
            except StopIteration:
                running.remove(steps)
        yield
    yield from handshake(hop)
    hop.close()


def many_frames(end, *, first):
    """A receiver that takes nothing is sent a bounded number of frames; then all come, in order."""
    places = Places()
    hop = end.open(1, places)
    payload = np.arange(100_003, dtype=np.uint32).view(np.uint8)
    yield from handshake(hop)
    if first:
        for index in range(200):
            hop.send(chunk(index, payload.nbytes), payload)
        yield from flush(hop)
    else:
        while not places.given:
            hop.advance()
            yield
        for _ in range(300):
            hop.advance()
            yield
        assert len(places.given) <= 5
        for index in range(200):
            head, memory = yield from get(hop)
            assert head.index == index
            assert np.array_equal(memory, payload)
    yield from handshake(hop)
    hop.close()


def two_hops(end, *, first):
    places = Places(), Places()
    hops = end.open(7, places[0]), end.open(8, places[1])
    for hop in hops:
        yield from handshake(hop)
    if first:
        for index in range(40):
            for which, hop in enumerate(hops):
                hop.send(chunk(index, 9000), content(1000 * which + index, 9000))
        while any(hop.unsent for hop in hops):
            for hop in hops:
                hop.advance()
            yield
    else:
        for which in (1, 0):  # the second first: the other must not be in its way
            for index in range(40):
                head, memory = yield from get(hops[which])
                assert head.index == index
                assert np.array_equal(memory, content(1000 * which + index, 9000))
    for hop in hops:
        yield from handshake(hop)
        hop.close()


def closed_in_the_middle(end, *, first):
    """Whoever closes first: the neighbour is told, nothing stays behind, and the next epoch knows nothing of it."""
    for closes_first in (True, False):
        epoch = 20 + 2 * closes_first
        hop = end.open(epoch, Places())
        yield from handshake(hop)
        payload = content(epoch, 3 << 20)
        for index in range(20 if first else 0):
            hop.send(chunk(index, payload.nbytes), payload)
        if first == closes_first:
            for index in range(0 if first else 3):
                head, _ = yield from get(hop)
                assert head.index == index
            while first and hop.unsent > 17:
                hop.advance()
                yield
            hop.close()
        else:
            while not first:  # take what still comes
                try:
                    hop.advance()
                except HopError as error:
                    lost = str(error)
                    break
                hop.receive()
                yield
            if first:
                lost = yield from until_lost(hop)
            assert f"{end.peer} is lost" in lost
            with pytest.raises(HopError, match=f"{end.peer} is lost"):
                hop.advance()  # and stays lost
            hop.close()
        with pytest.raises(HopError, match="lost|closed"):
            hop.advance()
        places = Places()
        hop = end.open(epoch + 1, places)
        if first:
            yield from send_all(hop, epoch)
        else:
            yield from receive_all(hop, places, epoch)
        yield from handshake(hop)
        while not end.settled():
            yield
        hop.close()


def last_words(end, *, first):
    """What was sent before closing is handed out before the loss is raised."""
    hop, afterwards = end.open(1, Places()), end.open(2, Places())
    yield from handshake(hop)
    if first:
        hop.send(FrameHead(kind=FrameKind.LAYOUT, policy_version=3, nbytes=4), np.arange(4, dtype=np.uint8))
        hop.send(FrameHead(kind=FrameKind.DONE, policy_version=3))
        yield from flush(hop)
        hop.close()
        yield from handshake(afterwards)
    else:
        for _ in handshake(afterwards):
            hop.advance()
            yield
        for _ in range(100):  # now the farewell is here as well
            hop.advance()
            yield
        (layout, memory), (done, nothing) = hop.receive(), hop.receive()
        assert layout.kind == FrameKind.LAYOUT
        assert memory.tolist() == [0, 1, 2, 3]
        assert done.kind == FrameKind.DONE
        assert nothing.nbytes == 0
        assert f"{end.peer} is lost" in (yield from until_lost(hop))
        hop.close()
    afterwards.close()


class Garbage:
    nbytes = 0

    def pack(self):
        return b"x" * HEAD_BYTES


def garbage(end, *, first):
    hop = end.open(1, Places())
    yield from handshake(hop)
    if first:
        hop.send(chunk(0, 3 << 20), content(0, 3 << 20))
        hop.send(Garbage())
    else:
        head, memory = yield from get(hop)
        assert np.array_equal(memory, content(0, head.nbytes))
    lost = yield from until_lost(hop)
    assert (f"{end.peer} is lost" if first else f"{end.peer} sends nonsense") in lost
    hop.close()


def refused_by_place(end, *, first):
    places = Places()

    def refuse(head):
        if head.index == 1:
            raise HopError(f"no memory for {head.nbytes} bytes")
        return places(head)

    hop = end.open(1, refuse)
    yield from handshake(hop)
    if first:
        for index in range(3):
            hop.send(chunk(index, 2 << 20), content(index, 2 << 20))
    else:
        head, memory = yield from get(hop)
        assert head.index == 0
        assert np.array_equal(memory, content(0, 2 << 20))
    lost = yield from until_lost(hop)
    assert (f"{end.peer} is lost" if first else "no memory for 2097152 bytes") in lost
    hop.close()
    while not end.settled():
        yield


def idle(end, *, first):
    """An idle hop costs next to nothing: the best of many tries, for the machine is shared."""
    hop = end.open(1, Places())
    yield from handshake(hop)
    best, busy = 1.0, 0
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(50):
            busy += hop.advance()
        best = min(best, (time.perf_counter() - began) / 50)
        yield
    assert busy <= 2, (
        "an idle hop says that it does something"
    )  # one end may be done, and shake hands, before the other
    assert best < 20e-6, best
    end.say(idle_us=round(best * 1e6, 2))
    yield from handshake(hop)
    hop.close()


SCENARIOS = (
    there_and_back,
    both_ways_at_once,
    many_frames,
    two_hops,
    closed_in_the_middle,
    last_words,
    garbage,
    refused_by_place,
    idle,
)

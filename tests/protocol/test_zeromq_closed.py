"""The controller learns at once, and once, that a peer's connection has closed; of nobody who is connected."""

import asyncio
import contextlib
import random
import signal
import sys
import time

import pytest
import uvloop
import zmq

from laminar.protocol import messages
from laminar.protocol.channel import PeerClosed, PeerGone
from laminar.protocol.connection import Connection, CurveKeys
from laminar.protocol.zeromq import ZmqControllerChannel, ZmqWorkerChannel

HELLO = messages.Hello(kind="rollout", index=0, pid=1, host="h", version="v")
CLOSED = PeerClosed(reason="its connection closed")
QUIET_S = 0.6  # longer than any probe that follows a closed connection
WORKER = """
import asyncio, sys
from pathlib import Path
from laminar.protocol import messages
from laminar.protocol.connection import Connection
from laminar.protocol.zeromq import ZmqWorkerChannel

async def main():
    channel = ZmqWorkerChannel(Connection.read(Path(sys.argv[1])), "rollout-0")
    for k in range(int(sys.argv[2])):
        await channel.send(messages.Progress(text=str(k)))
    await channel.receive()

asyncio.run(main())
"""


def connection(address, keys) -> Connection:
    return Connection.to_this_process(address, "r", controller=keys[0], worker=keys[1])


async def received(controller, limit_s=10.0):
    return await asyncio.wait_for(controller.receive(), limit_s)


async def nothing_more(controller):
    """Nothing comes while all probes are made."""
    with pytest.raises(TimeoutError):
        await received(controller, QUIET_S)


class Dealers:
    """Peers as plain sockets of one context."""

    def __init__(self, address, keys):
        self.context = zmq.Context()
        self.connection = connection(address, keys)

    def connect(self, identity):
        dealer = self.context.socket(zmq.DEALER)
        dealer.identity = identity
        dealer.curve_serverkey = self.connection.controller_public_key.encode()
        dealer.curve_publickey = self.connection.worker_public_key.encode()
        dealer.curve_secretkey = self.connection.worker_secret_key.encode()
        dealer.connect(self.connection.address)
        return dealer

    def say(self, dealer, text):
        dealer.send_multipart([b"Progress", b"\x81\xa4text" + bytes([0xA0 + len(text)]) + text.encode()])


@pytest.fixture
async def dealers(controller, keys):
    made = Dealers(controller.address, keys)
    yield made
    made.context.destroy(linger=0)


class Proxy:
    """Passes connections through, and breaks them."""

    def __init__(self, port):
        self.port = port
        self.ends = []  # (the worker's, the controller's)
        self.pumps = set()
        self.accepted = asyncio.Queue()

    async def start(self):
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def accept(self, reader, writer):
        there_reader, there = await asyncio.open_connection("127.0.0.1", self.port)
        self.ends.append((writer, there))
        self.accepted.put_nowait(None)
        for source, target in ((reader, there), (there_reader, writer)):
            pump = asyncio.create_task(self.pump(source, target))
            self.pumps.add(pump)

    async def pump(self, source, target):
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                target.write(data)

    async def stop(self):
        self.server.close()
        for pump in self.pumps:
            pump.cancel()
        await asyncio.gather(*self.pumps, return_exceptions=True)
        for pair in self.ends:
            for end in pair:
                end.transport.abort()


@pytest.fixture
async def proxied(controller, keys):
    """A worker whose connection goes through a proxy."""
    proxy = Proxy(int(controller.address.rpartition(":")[2]))
    worker = ZmqWorkerChannel(connection(await proxy.start(), keys), "rollout-0")
    yield proxy, worker
    worker.close()
    await proxy.stop()


async def test_a_killed_process_is_noticed_at_once_after_its_last_words(controller, keys, tmp_path):
    path = connection(controller.address, keys).write(tmp_path)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, str(path), "2000")
    peers = {(await received(controller, 30))[0] for _ in range(1000)}
    last = {await received(controller, 30) for _ in range(1000)}
    assert (peers.pop(), messages.Progress(text="1999")) in last
    process.send_signal(signal.SIGKILL)
    began = time.perf_counter()
    peer, message = await received(controller)
    took_s = time.perf_counter() - began
    assert message == CLOSED
    assert peer.startswith(b"rollout-0@")
    assert took_s < 0.5
    assert await process.wait() == -signal.SIGKILL
    await nothing_more(controller)
    with pytest.raises(PeerGone):
        await controller.send(peer, messages.Heartbeat())


async def test_a_stopped_process_is_not_gone(controller, keys, tmp_path):
    path = connection(controller.address, keys).write(tmp_path)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, str(path), "1")
    await received(controller, 30)
    process.send_signal(signal.SIGSTOP)
    await nothing_more(controller)
    process.kill()
    assert (await received(controller))[1] == CLOSED
    await process.wait()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_last_words_come_before_the_notice(loop_factory):
    async def talk():
        keys = CurveKeys.create(), CurveKeys.create()
        controller = ZmqControllerChannel("127.0.0.1", 0, controller_keys=keys[0], worker_public_key=keys[1].public)
        for life in range(10):
            worker = ZmqWorkerChannel(connection(controller.address, keys), f"rollout-{life}")
            for _ in range(300):
                await worker.send(HELLO)
            await asyncio.to_thread(worker._socket.socket.close, 1000)
            await asyncio.to_thread(worker._socket.context.term)  # all of it has left, and none has been received
            got = [(await received(controller))[1] for _ in range(301)]
            assert got == [*[HELLO] * 300, CLOSED]
        await nothing_more(controller)
        controller.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(talk())


async def test_in_a_backlog_without_end_the_notice_comes_all_the_same(controller, dealers, monkeypatch):
    monkeypatch.setattr("laminar.protocol.zeromq.LONGEST_NOTICE_S", 0.05)
    dies, talks = dealers.connect(b"dies"), dealers.connect(b"talks")
    for dealer in (dies, talks):
        dealers.say(dealer, "hello")
        await received(controller)
    dies.close(0)
    deadline = time.perf_counter() + 10
    while time.perf_counter() < deadline:
        for _ in range(50):  # always more than is received
            dealers.say(talks, "more")
        peer, message = await received(controller)
        if peer == b"dies":
            break
    assert (peer, message) == (b"dies", CLOSED)


async def test_strangers_and_the_silent_are_passed_over(controller, keys, dealers):
    silent = dealers.connect(b"silent")
    stranger = Dealers(controller.address, (keys[0], CurveKeys.create()))
    refused = stranger.connect(b"stranger")
    stranger.say(refused, "let me in")
    _, writer = await asyncio.open_connection("127.0.0.1", int(controller.address.rpartition(":")[2]))
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    friend = dealers.connect(b"friend")
    dealers.say(friend, "hello")
    assert (await received(controller))[0] == b"friend"
    silent.close(0)
    writer.close()
    stranger.context.destroy(linger=0)
    await nothing_more(controller)
    dealers.say(friend, "still here")
    assert await received(controller) == (b"friend", messages.Progress(text="still here"))


async def test_probes_are_not_messages(controller, dealers, keys):
    worker = ZmqWorkerChannel(connection(controller.address, keys), "rollout-0")
    await worker.send(HELLO)
    peer, _ = await received(controller)
    for _ in range(3):
        other = dealers.connect(b"other")
        dealers.say(other, "hello")
        await received(controller)
        other.close(0)
        assert await received(controller) == (b"other", CLOSED)
    await nothing_more(controller)
    await controller.send(peer, messages.Shutdown(reason="enough"))
    assert await asyncio.wait_for(worker.receive(), 10) == messages.Shutdown(reason="enough")
    worker.close()


async def test_a_worker_that_comes_back_is_heard_and_its_end_noticed_again(controller, proxied):
    proxy, worker = proxied
    await worker.send(HELLO)
    peer, _ = await received(controller)
    for round_ in range(1, 4):
        for end in proxy.ends[-1]:
            end.transport.abort()
        assert await received(controller) == (peer, CLOSED)
        await worker.send(messages.Progress(text=f"back {round_}"))
        assert await received(controller) == (peer, messages.Progress(text=f"back {round_}"))
        await controller.send(peer, messages.Progress(text="welcome back"))
        assert await asyncio.wait_for(worker.receive(), 10) == messages.Progress(text="welcome back")
    await nothing_more(controller)


async def test_a_worker_that_came_back_before_its_old_connection_closed_is_not_gone(controller, proxied):
    proxy, worker = proxied
    await worker.send(HELLO)
    peer, _ = await received(controller)
    await proxy.accepted.get()
    proxy.ends[0][0].transport.abort()  # the worker's end only: the controller's stays open
    await asyncio.wait_for(proxy.accepted.get(), 10)
    await worker.send(messages.Progress(text="over a new one"))
    assert await received(controller) == (peer, messages.Progress(text="over a new one"))
    proxy.ends[0][1].transport.abort()
    await nothing_more(controller)
    await worker.send(HELLO)
    assert await received(controller) == (peer, HELLO)
    proxy.server.close()
    for end in proxy.ends[-1]:
        end.transport.abort()
    assert await received(controller) == (peer, CLOSED)  # though its descriptor was never told
    await nothing_more(controller)


async def test_of_many_peers_every_death_is_told_once_and_no_living_one(controller, dealers):
    rng = random.Random(4)
    alive, killed, closed, heard = {}, {}, {}, set()

    async def listen():
        while True:
            peer, message = await controller.receive()
            if message == CLOSED:
                assert peer not in alive
                closed[peer] = closed.get(peer, 0) + 1
            else:
                assert peer not in closed
                heard.add(peer)

    listener = asyncio.create_task(listen())
    born = 0
    while born < 600:
        for _ in range(rng.randrange(30)):
            if len(alive) < 200:
                identity = f"w{born}".encode()
                born += 1
                alive[identity] = dealers.connect(identity)
                dealers.say(alive[identity], "hello")
        for identity in rng.sample(sorted(alive), rng.randrange(len(alive) // 2 + 1)):
            alive.pop(identity).close(0)  # also before its hello has left
            killed[identity] = None
        await asyncio.sleep(rng.random() * 0.03)
    async with asyncio.timeout(20):
        while not (heard >= set(alive) and set(closed) == heard - set(alive)):
            assert not listener.done(), listener.exception()
            await asyncio.sleep(0.01)
    await asyncio.sleep(QUIET_S)
    assert set(closed) == heard & set(killed)
    assert set(closed.values()) == {1}
    assert len(closed) > 100
    assert set(alive) <= set(controller._watch.descriptors)
    listener.cancel()


async def test_closing_is_quick_with_peers_and_probes_under_way(keys):
    controller = ZmqControllerChannel("127.0.0.1", 0, controller_keys=keys[0], worker_public_key=keys[1].public)
    dealers = Dealers(controller.address, keys)
    peers = [dealers.connect(f"w{k}".encode()) for k in range(20)]
    for peer in peers:
        dealers.say(peer, "hello")
        await received(controller)
    for peer in peers[:10]:
        peer.close(0)
    assert (await received(controller))[1] == CLOSED
    began = time.perf_counter()
    controller.close()
    assert time.perf_counter() - began < 1.5
    assert controller._socket.context.closed
    await asyncio.sleep(QUIET_S)  # probes that were due do nothing
    dealers.context.destroy(linger=0)

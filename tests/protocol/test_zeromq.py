"""The ZeroMQ channels: authentication, a taken port, a peer that is not there, many messages, and an end in time."""

import asyncio
import threading

import pytest
import uvloop
import zmq

from laminar.errors import UserError
from laminar.protocol import messages, zeromq
from laminar.protocol.channel import PeerGone
from laminar.protocol.connection import Connection, CurveKeys
from laminar.protocol.zeromq import ZmqControllerChannel, ZmqWorkerChannel

HELLO = messages.Hello(kind="rollout", index=0, pid=1, host="h", version="v")


def connection(address, controller_keys, worker_keys) -> Connection:
    return Connection.to_this_process(address, "r", controller=controller_keys, worker=worker_keys)


async def test_messages_go_both_ways(controller, keys):
    worker = ZmqWorkerChannel(connection(controller.address, *keys), "rollout-0")
    await worker.send(HELLO)
    peer, hello = await asyncio.wait_for(controller.receive(), 10)
    assert hello == HELLO
    await controller.send(peer, messages.Shutdown(reason="enough"))
    assert await asyncio.wait_for(worker.receive(), 10) == messages.Shutdown(reason="enough")
    worker.close()


async def test_a_peer_without_the_runs_key_is_refused(controller, keys):
    stranger = ZmqWorkerChannel(connection(controller.address, keys[0], CurveKeys.create()), "rollout-9")
    dealer = stranger._socket.socket
    refused = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    await stranger.send(HELLO)
    assert await asyncio.to_thread(refused.poll, 10_000)
    event = refused.recv_multipart()
    assert int.from_bytes(event[0][:2], "little") == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    friend = ZmqWorkerChannel(connection(controller.address, *keys), "rollout-0")
    await friend.send(HELLO)
    peer, _ = await asyncio.wait_for(controller.receive(), 10)
    assert peer.startswith(b"rollout-0@")  # nothing of the stranger's came before it
    dealer.disable_monitor()
    refused.close()
    stranger.close()
    friend.close()


async def test_sending_to_a_peer_that_is_not_there_says_so(controller):
    with pytest.raises(PeerGone, match="nobody is not connected"):
        await controller.send(b"nobody", messages.Heartbeat())


async def test_a_taken_port_is_the_users_to_change(controller, keys):
    port = int(controller.address.rpartition(":")[2])
    with pytest.raises(
        UserError,
        match=f"controller.port: cannot listen on 127.0.0.1:{port}.*Set controller.port to a free one, or to 0",
    ):
        ZmqControllerChannel("127.0.0.1", port, controller_keys=keys[0], worker_public_key=keys[1].public)


async def test_a_host_of_another_machine_is_the_users_to_change(keys):
    with pytest.raises(UserError, match="controller.host: cannot listen on 192.0.2.1"):
        ZmqControllerChannel("192.0.2.1", 0, controller_keys=keys[0], worker_public_key=keys[1].public)


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_no_message_is_slept_through_when_both_ends_send_at_the_same_time(loop_factory):
    count = 2000

    async def talk():
        keys = CurveKeys.create(), CurveKeys.create()
        controller = ZmqControllerChannel("127.0.0.1", 0, controller_keys=keys[0], worker_public_key=keys[1].public)
        worker = ZmqWorkerChannel(connection(controller.address, *keys), "rollout-0")
        await worker.send(HELLO)
        peer, _ = await asyncio.wait_for(controller.receive(), 10)

        async def receive(channel, allowance):
            for _ in range(count):
                await channel.receive()
                allowance.release()

        async def send(allowance, say):
            for _ in range(count):
                await allowance.acquire()  # a message more for every message heard: each wait counts
                await say(messages.Heartbeat())

        up, down = asyncio.Semaphore(1), asyncio.Semaphore(1)
        parts = (
            receive(controller, down),
            receive(worker, up),
            send(up, worker.send),
            send(down, lambda message: controller.send(peer, message)),
        )
        try:
            await asyncio.wait_for(asyncio.gather(*parts), 20)
        finally:
            worker.close()
            controller.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(talk())


async def test_a_backlog_leaves_turns_to_others(controller, keys, monkeypatch):
    monkeypatch.setattr(zeromq, "LONGEST_TURN_S", 0.0)
    worker = ZmqWorkerChannel(connection(controller.address, *keys), "rollout-0")
    turns = 0

    async def count_turns():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    for _ in range(1000):
        await worker.send(HELLO)
    await asyncio.wait_for(controller.receive(), 10)
    other = asyncio.create_task(count_turns())
    for _ in range(999):
        await controller.receive()
    assert turns > 900
    other.cancel()
    worker.close()


async def test_the_end_comes_even_if_zeromq_does_not_let_go(keys, monkeypatch):
    released = threading.Event()
    channel = ZmqControllerChannel("127.0.0.1", 0, controller_keys=keys[0], worker_public_key=keys[1].public)
    term = zmq.Context.term
    with monkeypatch.context() as patch:
        patch.setattr(zeromq, "LINGER_MS", 50)
        patch.setattr(zmq.Context, "term", lambda context: released.wait(30) and term(context))
        channel.close()
        assert not released.is_set()
    released.set()
    channel.close()  # may be called again


def test_the_connection_file_is_private_and_round_trips(tmp_path):
    written = connection("tcp://127.0.0.1:1", CurveKeys.create(), CurveKeys.create())
    path = written.write(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Connection.read(path) == written
    assert [entry.name for entry in tmp_path.iterdir()] == ["connection.json"]


def test_a_missing_connection_file_says_what_to_start(tmp_path):
    with pytest.raises(UserError, match="Start the controller first"):
        Connection.read(tmp_path / "connection.json")
    (tmp_path / "connection.json").write_text("{}")
    with pytest.raises(UserError, match="not a connection file"):
        Connection.read(tmp_path / "connection.json")

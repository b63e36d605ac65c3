"""The ZeroMQ channels: authentication, a taken port, a peer that is not there."""

import asyncio

import pytest
import zmq
import zmq.asyncio

from laminar.errors import UserError
from laminar.protocol import messages
from laminar.protocol.channel import PeerGone
from laminar.protocol.connection import Connection, CurveKeys
from laminar.protocol.zeromq import ZmqControllerChannel, ZmqWorkerChannel

HELLO = messages.Hello(kind="rollout", index=0, pid=1, host="h", version="v")


@pytest.fixture
async def keys():
    return CurveKeys.create(), CurveKeys.create()


@pytest.fixture
async def controller(keys):
    channel = ZmqControllerChannel("127.0.0.1", 0, controller_keys=keys[0], worker_public_key=keys[1].public)
    yield channel
    channel.close()


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
    refused = stranger._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    await stranger.send(HELLO)
    event = await asyncio.wait_for(refused.recv_multipart(), 10)
    assert int.from_bytes(event[0][:2], "little") == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    friend = ZmqWorkerChannel(connection(controller.address, *keys), "rollout-0")
    await friend.send(HELLO)
    peer, _ = await asyncio.wait_for(controller.receive(), 10)
    assert peer.startswith(b"rollout-0@")  # nothing of the stranger's came before it
    stranger._socket.disable_monitor()
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

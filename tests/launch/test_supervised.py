"""The controller's end of the line to its supervisor, with the test at the other."""

import asyncio
import json
import socket

import pytest

from laminar.errors import RunFailed
from laminar.launch.commands import Command
from laminar.launch.supervised import SupervisedProcesses

COMMAND = Command(name="rollout-0", argv=("true",), environment={}, workers=("rollout-0",))


@pytest.fixture
async def line(tmp_path):
    """The processes, and a stream pair in the supervisor's place."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    writer.write(b'{"living": {"relay-1": 7}, "supervisor": 1}\n')
    gone = asyncio.Event()
    processes = await SupervisedProcesses.connect(tmp_path, theirs.detach(), gone.set)
    yield processes, reader, writer
    assert not gone.is_set()
    writer.close()
    await asyncio.wait_for(gone.wait(), 10)
    assert not processes.failure.done(), "it would have the workers told that the run has ended"


def tell(writer, **notice):
    writer.write(json.dumps(notice).encode() + b"\n")


async def test_a_process_is_asked_for_and_its_end_is_told(line):
    processes, reader, writer = line
    ends = []
    processes.on_exit = lambda command, status: ends.append((command.name, status))
    starting = asyncio.create_task(processes.start(COMMAND))
    assert json.loads(await reader.readline())["command"]["name"] == "rollout-0"
    tell(writer, started="rollout-0", pid=12)
    assert await starting == 12
    assert processes.owns(12) and processes.owns(7) and not processes.owns(13)
    tell(writer, ended="rollout-0", status=-9)
    stopping = asyncio.create_task(processes.stop(1, asyncio.Event()))
    assert json.loads(await reader.readline())["do"] == "stop"
    tell(writer, stopped=[])
    assert await stopping == []
    assert ends == [("rollout-0", -9)]
    assert not processes.owns(12)


async def test_a_process_that_cannot_be_started_fails_whoever_asked_for_it(line):
    processes, reader, writer = line
    starting = asyncio.create_task(processes.start(COMMAND))
    await reader.readline()
    tell(writer, failed="rollout-0", error="no memory")
    with pytest.raises(RunFailed, match="rollout-0 could not be started: no memory"):
        await starting

"""Both transports against the same scenarios, and what only one of them has to withstand."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from laminar.workers.relay import tcp_door
from laminar.workers.relay.hop import FrameHead, FrameKind, HopError
from laminar.workers.relay.tcp_door import TcpDoor
from laminar.workers.relay.tcp_hop import TURN_BYTES, TcpHop, preamble
from tests.workers.relay.hop_scenarios import SCENARIOS, Places, chunk, content, get, handshake, until_lost

DRIVER = Path(__file__).with_name("hop_driver.py")
ROOT = Path(__file__).parents[3]
KEY = b"k" * 32
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.timeout(90)


def run_world(size, memory, what):
    """Run a function of the driver on `size` ranks; the lines they said."""
    mpi_directory = memory / "mpi"
    mpi_directory.mkdir()
    command = [Path(sys.executable).with_name("mpirun"), "--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe"]
    command += ["--bind-to", "none", "--prtemca", "prte_tmpdir_base", mpi_directory]
    command += ["--mca", "btl_sm_backing_directory", mpi_directory, "-n", size, sys.executable, DRIVER, what]
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=ENVIRONMENT,
    )
    try:
        out, err = process.communicate(timeout=60)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def mpi_said(tmp_path_factory):
    """All scenarios over one start of mpirun."""
    return run_world(2, tmp_path_factory.mktemp("world"), "run_scenarios")


@pytest.fixture
def door():
    door = TcpDoor("127.0.0.1", KEY)
    yield door
    door.close()


def dial(door, epoch, *, key=KEY, place=None, peer="relay-1"):
    return TcpHop.dial(door.address("127.0.0.1"), epoch, key, peer, place or Places())


class TcpEnd:
    """One end of a scenario."""

    def __init__(self, door, *, first):
        self.door = door
        self.first = first
        self.peer = "relay-1" if first else "relay-0"

    def open(self, epoch, place):
        return dial(self.door, epoch, place=place) if self.first else self.door.hop(epoch, self.peer, place)

    def settled(self):
        return True

    def say(self, **facts):
        pass


def drive(*running, limit_s=20.0):
    """Step generators in turn until all have ended."""
    deadline = time.monotonic() + limit_s
    left = list(running)
    while left:
        for steps in tuple(left):
            try:
                next(steps)
            except StopIteration:
                left.remove(steps)
        assert time.monotonic() < deadline, f"{left} did not end"


def pair(door, epoch=1):
    """(dialling end, receiving end), connected."""
    ends = dial(door, epoch), door.hop(epoch, "relay-0", Places())
    drive(*(handshake(end) for end in ends))
    return ends


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_tcp(scenario, door):
    drive(*(scenario(TcpEnd(door, first=first), first=first) for first in (True, False)))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_mpi(scenario, mpi_said):
    lines = [line for line in mpi_said if line["scenario"] == scenario.__name__]
    assert sorted(line["rank"] for line in lines) == [0, 1]
    for line in lines:
        assert line["error"] is None, f"rank {line['rank']}: {line['error']}"


def test_a_world_has_one_name_that_no_other_has(mpi_said):
    names = {line["name"] for line in mpi_said if line["scenario"] == "world"}
    assert len(names) == 1
    assert len(names.pop()) == 16


def test_a_killed_rank_is_named_and_the_other_hops_go_on(tmp_path):
    said = {line["rank"]: line for line in run_world(3, tmp_path, "lose_a_neighbour")}
    assert said[0]["error"].startswith("relay-1 is lost")
    assert said[0]["unsent"] > 0
    assert said[0]["seconds"] < 1
    assert said[0]["done"]
    assert said[0]["settled"]
    assert said[2]["frames"] == 60


def test_a_killed_dialler_is_named(door):
    hop = door.hop(1, "relay-1", Places())
    command = [sys.executable, DRIVER, "dial_and_die", door.address("127.0.0.1"), KEY.hex()]
    victim = subprocess.Popen(command, env=ENVIRONMENT)
    try:
        for _ in get(hop):
            pass
        hop.send(FrameHead(kind=FrameKind.WANT, policy_version=3))
        with pytest.raises(HopError, match="relay-1 is lost"):
            while True:
                hop.advance()
                hop.receive()
    finally:
        victim.kill()
        assert victim.wait() == -signal.SIGKILL
    hop.close()


def test_a_wrong_key_is_refused_and_the_right_neighbour_still_gets_in(door):
    hop = door.hop(1, "relay-0", Places())
    wrong = dial(door, 1, key=b"w" * 32)

    def wait():
        while not door.refused:
            assert not hop.advance()
            yield

    def lost():
        assert "relay-1 is lost" in (yield from until_lost(wrong))

    drive(wait(), lost())
    right = dial(door, 1)
    drive(handshake(hop), handshake(right))
    for each in (hop, wrong, right):
        each.close()


def test_an_epoch_that_is_over_is_refused(door):
    first, second = pair(door, epoch=5)
    waiting = door.hop(6, "relay-0", Places())
    for epoch in (5, 4):
        late = dial(door, epoch)
        while door.refused < 6 - epoch:
            late.advance()
            waiting.advance()
        late.close()
    drive(handshake(first), handshake(second))  # a second claim to its epoch has not harmed it
    first.close(), second.close(), waiting.close()


def test_a_neighbour_may_dial_before_it_is_expected(door):
    waiting = door.hop(1, "relay-0", Places())
    early = dial(door, 3)
    while not door._early:
        early.advance()
        waiting.advance()
    waiting.close()
    drive(handshake(early), handshake(door.hop(3, "relay-0", Places())))
    early.close()


def test_silent_strangers_hold_up_nobody_and_are_closed(door, monkeypatch):
    address = door._listener.getsockname()
    silent = [socket.create_connection(address) for _ in range(3)]
    slow = socket.create_connection(address)
    slow.send(preamble(1, KEY)[:7])
    first, second = pair(door, epoch=2)
    waiting = door.hop(3, "relay-0", Places())
    waiting.advance()
    assert door.refused == 0
    now = time.monotonic() + tcp_door.STRANGER_LIMIT_S + 1
    monkeypatch.setattr(tcp_door.time, "monotonic", lambda: now)
    waiting.advance()
    assert door.refused == 4
    for stranger in (*silent, slow):
        assert stranger.recv(1) == b""
        stranger.close()
    first.close(), second.close(), waiting.close()


def test_a_flood_of_strangers_is_bounded(door):
    waiting = door.hop(1, "relay-0", Places())
    strangers = []
    for _ in range(tcp_door.MAX_STRANGERS + 10):
        strangers.append(socket.create_connection(door._listener.getsockname()))
        waiting.advance()
    assert len(door._strangers) <= tcp_door.MAX_STRANGERS
    assert door.refused >= 9
    neighbour = dial(door, 1)
    drive(handshake(neighbour), handshake(waiting))
    for each in (*strangers, neighbour, waiting):
        each.close()


def test_a_preamble_may_come_in_pieces(door):
    hop = door.hop(1, "relay-0", Places())
    with socket.create_connection(door._listener.getsockname()) as neighbour:
        neighbour.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in preamble(1, KEY) + FrameHead(kind=FrameKind.DONE, policy_version=9).pack():
            neighbour.send(bytes([byte]))
            hop.advance()
        for _ in get(hop):
            pass
    hop.close()


def test_where_nobody_listens_the_hop_is_lost_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(HopError, match=f"relay-4 cannot be reached at 127.0.0.1:{port}: ECONNREFUSED"):
            hop = TcpHop.dial(f"127.0.0.1:{port}", 1, KEY, "relay-4", Places())
            while True:
                hop.advance()


def test_a_neighbour_that_does_not_answer_is_given_up():
    full = socket.socket()  # its backlog is full: the system answers no more connections
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    address = full.getsockname()
    fillers = []
    for _ in range(4):
        fillers.append(socket.socket())
        fillers[-1].setblocking(False)
        fillers[-1].connect_ex(address)
    hop = TcpHop.dial(f"127.0.0.1:{address[1]}", 1, KEY, "relay-4", Places())
    assert not hop.advance()
    assert hop.wants_write
    hop._dialling.until = time.monotonic() - 1
    with pytest.raises(HopError, match="relay-4 has not answered at 127.0.0.1:"):
        hop.advance()
    for each in (hop, full, *fillers):
        each.close()


@pytest.mark.parametrize("address", ["", "somewhere:1", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:x", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(HopError, match="relay-4 cannot be reached at .* expected a numeric host:port"):
        TcpHop.dial(address, 1, KEY, "relay-4", Places())


def test_ipv6():
    try:
        door = TcpDoor("::1", KEY)
    except OSError:
        pytest.skip("this machine has no IPv6")
    hop = TcpHop.dial(door.address("::1"), 1, KEY, "relay-1", Places())
    other = door.hop(1, "relay-0", Places())
    drive(handshake(hop), handshake(other))
    hop.close(), other.close(), door.close()


def test_select_alone_is_enough_to_wait(door):
    """Nobody polls: both ends advance only when the system says that they can."""
    payload = content(1, 20 << 20)
    receiver = door.hop(1, "relay-0", Places())
    sender = dial(door, 1)
    sender.send(chunk(0, payload.nbytes), payload)
    while (frame := receiver.receive()) is None:
        readable, writable, _ = select.select([receiver, sender], [sender] if sender.wants_write else [], [], 5)
        assert readable or writable, "nothing to wait for, and not complete"
        for hop in {*readable, *writable}:
            hop.advance()
    assert np.array_equal(frame[1], payload)
    assert not sender.wants_write
    assert not select.select([receiver, sender], [], [], 0)[0]
    sender.close(), receiver.close()


def test_one_turn_is_bounded(door):
    sender, receiver = pair(door)
    payload = content(1, 32 << 20)
    sender.send(chunk(0, payload.nbytes), payload)
    turns = 0
    while receiver.receive() is None:
        sender.advance()
        turns += receiver.advance()
    assert turns >= payload.nbytes // TURN_BYTES
    sender.close(), receiver.close()


def test_a_head_must_speak_of_its_payload(door):
    hop = door.hop(1, "relay-0", Places())
    for head, payload in ((chunk(0, 5), content(0, 4)), (chunk(0, 5), None), (chunk(0, 0), content(0, 1))):
        with pytest.raises(ValueError, match="a head that speaks of"):
            hop.send(head, payload)
    hop.close()


def test_no_mpi_is_loaded_before_there_is_a_world():
    code = (
        "import sys, laminar.workers.relay.tcp_door, laminar.workers.relay.mpi_hop\n"
        "sys.exit(any(name.split('.')[0] in ('mpi4py', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0

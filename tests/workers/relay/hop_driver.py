"""Processes for `test_hops.py`: one rank of an mpirun world, or the victim of a killing at the other end of a TCP hop."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback

import numpy as np

from laminar.workers.relay.hop import FrameHead, FrameKind, HopError
from laminar.workers.relay.mpi_hop import MpiWorld
from laminar.workers.relay.tcp_hop import TcpHop
from tests.workers.relay.hop_scenarios import SCENARIOS, Places, chunk, content, get

CHUNK = 2 << 20


class MpiEnd:
    """One rank's end of a scenario."""

    def __init__(self, world, number):
        self.world = world
        self.number = number
        self.peer = f"relay-{1 - world.rank}"
        self.said = {}

    def open(self, epoch, place):
        return self.world.hop(1 - self.world.rank, 100 * self.number + epoch, self.peer, place)

    def settled(self):
        return self.world.settle()

    def say(self, **facts):
        self.said |= facts


def say(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def run_scenarios(world):
    say(rank=world.rank, scenario="world", name=world.name, error=None, library=world.library)
    for number, scenario in enumerate(SCENARIOS):
        end, error = MpiEnd(world, number), None
        deadline = time.monotonic() + 10
        try:
            for _ in scenario(end, first=world.rank == 0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the other end of {scenario.__name__} has not answered")
        except (AssertionError, HopError, TimeoutError, ValueError):
            error = traceback.format_exc()
        say(rank=world.rank, scenario=scenario.__name__, error=error, **end.said)
        while not world.settle() and time.monotonic() < deadline:
            pass  # the neighbour may still be waiting for what was closed here
        world.comm.Barrier()


def lose_a_neighbour(world):
    """Ranks 0 and 2 go on with each other when rank 1, in the middle of frames from and to 0, is killed."""
    if world.rank == 1:
        hop = world.hop(0, 1, "relay-0", Places())
        send_until_killed(hop, kill=lambda: hop.receive() is not None)
    other = 2 - world.rank
    hop = world.hop(other, 2, f"relay-{other}", Places())
    frames = 0
    lost = None
    if world.rank == 2:
        while frames < 60:
            advance(hop)
            frame = hop.receive()
            frames += frame is not None
            assert frame is None or np.array_equal(frame[1], content(frame[0].index, CHUNK))
        hop.send(FrameHead(kind=FrameKind.DONE, policy_version=3))
        while hop.unsent:
            advance(hop)
        say(rank=2, frames=frames)
        return
    victim = world.hop(1, 1, "relay-1", Places())
    for index in range(60):
        hop.send(chunk(index, CHUNK), content(index, CHUNK))
        victim.send(chunk(index, CHUNK), content(index, CHUNK))
    began = time.monotonic()
    while (done := hop.receive()) is None or lost is None:
        advance(hop)
        if lost is None:
            try:
                victim.advance()
                if victim.receive() is not None:
                    began = time.monotonic()  # it still lives
            except HopError as error:
                lost = {"error": str(error), "seconds": time.monotonic() - began, "unsent": victim.unsent}
                victim.close()
        if done is not None and lost is None:
            raise AssertionError("done before the death was noticed: send more")
    while not world.settle() and time.monotonic() < began + 5:
        advance(hop)
    say(rank=0, done=done[0].kind == FrameKind.DONE, settled=world.settle(), **lost)


def advance(hop):
    if not hop.advance():
        time.sleep(20e-6)


def send_until_killed(hop, kill):
    payload = content(0, CHUNK)
    for index in range(1000):
        hop.send(chunk(index, CHUNK), payload)
    while not kill():
        advance(hop)
    os.kill(os.getpid(), signal.SIGKILL)


def dial_and_die(address, key):
    """Send 2 MiB chunks for ever; be killed in the middle of one after the first frame that comes back."""
    hop = TcpHop.dial(address, 1, bytes.fromhex(key), "relay-0", Places())
    send_until_killed(hop, kill=lambda: hop.receive() is not None)


def carry_512_mib(world):
    """One way, rank 0 to rank 1, against a copy of the same bytes."""
    size, piece = 512 << 20, 4 << 20
    memory = np.ones(size, np.uint8)
    hop = world.hop(1 - world.rank, 5, "peer", lambda head: memory[head.index * piece : (head.index + 1) * piece])
    for _ in range(3):
        world.comm.Barrier()
        began = time.monotonic()
        if world.rank == 0:
            for index in range(size // piece):
                hop.send(chunk(index, piece), memory[index * piece : (index + 1) * piece])
            for _ in get(hop):
                pass
        else:
            for _ in range(size // piece):
                for _ in get(hop):
                    pass
            hop.send(FrameHead(kind=FrameKind.DONE, policy_version=3))
            while hop.unsent:
                hop.advance()
        seconds = time.monotonic() - began
        if world.rank == 0:
            copy = np.ones(size, np.uint8)  # its pages are there
            began = time.monotonic()
            copy[:] = memory
            say(seconds=seconds, copy=time.monotonic() - began)


def main():
    match sys.argv[1]:
        case "dial_and_die":
            dial_and_die(*sys.argv[2:])
        case name:
            globals()[name](MpiWorld())
            sys.stdout.flush()
            os._exit(0)


main()

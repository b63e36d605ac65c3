"""Relay processes, under mpirun and alone, with the test in the controller's place."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from laminar.config.schema import ExperimentConfig
from laminar.errors import RunFailed
from laminar.protocol.channel import PeerClosed
from laminar.protocol.connection import Connection, CurveKeys
from laminar.protocol.messages import (
    BroadcastEnded,
    Carry,
    CarryProgress,
    Heartbeat,
    Hello,
    HopFailed,
    HopOrder,
    Progress,
    Ready,
    RelayJoined,
    Shutdown,
    WeightsStored,
    Welcome,
    WorkerFailed,
)
from laminar.protocol.zeromq import ZmqControllerChannel
from laminar.weights import run_memory
from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore
from laminar.workers.relay.main import _watch_mpirun

ROOT = Path(__file__).parents[3]
CHUNK_BYTES = 1 << 20
CHUNKS = 8
LAYOUT = WeightLayout.plan([("w", "bfloat16", (CHUNKS * CHUNK_BYTES // 2,))])
FULL_BYTES = LAYOUT.total_bytes + len(LAYOUT.to_bytes())

pytestmark = pytest.mark.timeout(120)


def config(**relay):
    return ExperimentConfig.model_validate(
        {
            "name": "relays",
            "model": {"path": "none"},
            "data": {"source": {"type": "jsonl", "path": "none"}},
            "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2},
            "relay": {"keep_versions": 2} | relay,
        }
    )


def contents(version):
    return np.random.default_rng(version).integers(0, 256, LAYOUT.total_bytes, np.uint8)


class Controller:
    """As much of a controller as relays need."""

    def __init__(self, run_dir):
        self.run_id = f"test-{uuid.uuid4().hex[:12]}"
        self.memory = run_memory.claim(self.run_id)
        self.run_dir = run_dir
        self.config = config()
        self.version_bytes = LAYOUT.total_bytes
        self.indexes, self.peers, self.pids, self.joined, self.ready = {}, {}, {}, {}, {}
        self.orders, self.epochs = itertools.count(1), itertools.count(1)
        keys, workers = CurveKeys.create(), CurveKeys.create()
        self.channel = ZmqControllerChannel("127.0.0.1", 0, controller_keys=keys, worker_public_key=workers.public)
        Connection.to_this_process(self.channel.address, self.run_id, controller=keys, worker=workers).write(run_dir)

    def store(self, rank):
        return WeightStore(self.run_id, f"relay-{rank}")

    async def next(self, *kinds):
        """(relay, message) of the next message of these kinds; the others are only noted. New relays are let in."""
        while True:
            peer, message = await asyncio.wait_for(self.channel.receive(), 60)
            if isinstance(message, Hello):
                await self._let_in(peer, message)
                continue
            index = self.indexes[peer]
            match message:
                case RelayJoined():
                    self.joined[index] = message
                case Ready():
                    self.ready[index] = message.detail
            if isinstance(message, kinds):
                return index, message
            assert isinstance(message, Heartbeat | Progress | RelayJoined | CarryProgress | PeerClosed), message

    async def _let_in(self, peer, hello):
        self.indexes[peer], self.peers[hello.index], self.pids[hello.index] = hello.index, peer, hello.pid
        welcome = Welcome(
            run_id=self.run_id,
            run_dir=str(self.run_dir),
            config=self.config.model_dump_json(),
            store=f"relay-{hello.index}",
            hop_key=b"k" * 32,
            version_bytes=self.version_bytes,
        )
        await self.channel.send(peer, welcome)

    async def relays(self, *indexes):
        """Wait until these are ready."""
        while not set(indexes) <= self.ready.keys():
            await self.next(Ready)

    def publish(self, version, rank=0):
        with self.store(rank).begin(version, LAYOUT) as writer:
            writer.buffer[:] = contents(version)
            writer.commit()

    def hop(self, upstream, downstream, address=None):
        """(as the upstream relay is told, as the downstream relay is told); by MPI where they share a world."""
        first, second = self.joined[upstream], self.joined[downstream]
        by_mpi = address is None and first.world == second.world != ""
        epoch = next(self.epochs)
        return (
            HopOrder(
                peer=f"relay-{downstream}",
                epoch=epoch,
                world_rank=second.world_rank if by_mpi else -1,
                address="" if by_mpi else address or second.address,
            ),
            HopOrder(peer=f"relay-{upstream}", epoch=epoch, world_rank=first.world_rank if by_mpi else -1, address=""),
        )

    async def tell(self, relay, version, upstream=None, downstream=None):
        carry = Carry(
            policy_version=version,
            order=next(self.orders),
            upstream=upstream,
            downstream=downstream,
            chunk_bytes=CHUNK_BYTES,
            encoding="delta",
            limit_s=40.0,
        )
        await self.channel.send(self.peers[relay], carry)

    async def chain(self, version, *relays, addresses=()):
        """Have a version carried; returns the hops by their two relays."""
        addresses = dict(addresses)
        pairs = list(itertools.pairwise(relays))
        hops = {pair: self.hop(*pair, addresses.get(pair)) for pair in pairs}
        for relay in relays:
            upstream = next((told for (_, below), (_, told) in hops.items() if below == relay), None)
            downstream = next((told for (above, _), (told, _) in hops.items() if above == relay), None)
            await self.tell(relay, version, upstream, downstream)
        return hops

    async def stored(self, version, *relays):
        """What these relays say when they have the version; its bytes are compared."""
        said = {}
        while not set(relays) <= said.keys():
            relay, message = await self.next(WeightsStored, HopFailed)
            if isinstance(message, WeightsStored):
                assert message.policy_version == version
                said[relay] = message
        for relay in relays:
            with self.store(relay).open(version) as reader:
                assert np.array_equal(reader.buffer, contents(version))
        return said

    async def progress(self, relay, received):
        """Wait until a relay has so many chunks."""
        while True:
            index, message = await self.next(CarryProgress, WeightsStored, HopFailed)
            if (
                index == relay
                and isinstance(message, CarryProgress)
                and message.received == received
                and message.chunks == CHUNKS
            ):
                return


@pytest.fixture
async def controller(tmp_path):
    controller = Controller(tmp_path)
    yield controller
    controller.channel.close()
    run_memory.remove(controller.run_id)


class Link:
    """A TCP link between two relays that the test can hold up or damage."""

    def __init__(self, target, *, hold_at=None, flip_at=None):
        self._target = target
        self._hold_at = hold_at  # bytes to the downstream relay after which nothing more comes
        self._flip_at = flip_at  # byte to the downstream relay that is damaged
        self._tasks, self._ends = set(), []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for end in self._ends:
            end.close()

    async def _serve(self, reader, writer):
        host, _, port = self._target.rpartition(":")
        there, here = await asyncio.open_connection(host, int(port))
        self._ends += [writer, here]
        self._tasks |= {asyncio.create_task(self._down(reader, here)), asyncio.create_task(self._up(there, writer))}

    async def _down(self, reader, writer):
        passed = 0
        while data := bytearray(await reader.read(1 << 16)):
            if self._hold_at is not None and passed + len(data) > self._hold_at:
                await asyncio.Event().wait()
            if self._flip_at is not None and passed <= self._flip_at < passed + len(data):
                data[self._flip_at - passed] ^= 1
            passed += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _up(self, reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
ENVIRONMENT |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(*command):
    """A process with a session of its own, all of which is gone afterwards."""
    process = subprocess.Popen([str(part) for part in command], env=ENVIRONMENT, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def world(controller, count):
    mpi_directory = controller.memory / "mpi"
    mpi_directory.mkdir()
    command = [Path(sys.executable).with_name("mpirun"), "--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe"]
    command += ["--bind-to", "none", "--prtemca", "prte_tmpdir_base", mpi_directory]
    command += ["--mca", "btl_sm_backing_directory", mpi_directory, "-n", count, sys.executable]
    return started(*command, "-m", "laminar.workers.relay.main", "--connect", controller.run_dir)


def alone(controller, index):
    return started(
        sys.executable, "-m", "laminar.workers.relay.main", "--connect", controller.run_dir, "--index", index
    )


async def ends(pid_fd):
    """Wait for the end of a process."""
    assert (await asyncio.to_thread(select.select, [pid_fd], [], [], 10))[0], "a relay outlived its mpirun"
    os.close(pid_fd)


async def versions_arrive(controller):
    for version in range(4):
        controller.publish(version)
        await controller.chain(version, 0, 1, 2)
        said = await controller.stored(version, 0, 1, 2)
        for relay in (1, 2):
            assert (said[relay].nbytes, said[relay].chunks, said[relay].damaged) == (LAYOUT.total_bytes, CHUNKS, 0)
            assert said[relay].received_bytes == FULL_BYTES  # the versions have nothing in common
            assert 0 < said[relay].latency_s < said[relay].seconds
    for relay in (0, 1, 2):
        await controller.channel.send(controller.peers[relay], BroadcastEnded(policy_version=3))
    async with asyncio.timeout(10):
        while any(controller.store(relay).versions() != [2, 3] for relay in (0, 1, 2)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # unlinking a file tells nobody


async def a_late_relay_joins_by_tcp_over_a_bad_link(controller):
    assert controller.joined[3].world == ""
    async with Link(controller.joined[3].address, flip_at=3 * CHUNK_BYTES + CHUNK_BYTES // 2) as address:
        await controller.chain(3, 2, 3, addresses={(2, 3): address})
        said = await controller.stored(3, 3)
    assert said[3].damaged == 1
    assert said[3].received_bytes == FULL_BYTES + CHUNK_BYTES


async def under_way(controller, version, *relays):
    """A chain that has come to a stop in the middle of a version: its first link is held up. Its hops."""
    controller.publish(version)
    first = tuple(relays[:2])
    async with Link(controller.joined[relays[1]].address, hold_at=4 * CHUNK_BYTES + CHUNK_BYTES // 2) as address:
        hops = await controller.chain(version, *relays, addresses={first: address})
        await controller.progress(relays[2], 4)
    return hops


async def bypass(controller, version, hops, lost, *, head, above_tail):
    """New neighbours for the two beside a lost relay, `above_tail` below the head."""
    told, tells = controller.hop(head, above_tail)
    await controller.tell(head, version, downstream=told)
    below = next((told for (above, _), (told, _) in hops.items() if above == above_tail), None)
    await controller.tell(above_tail, version, upstream=tells, downstream=below)


async def a_stopped_relay_is_bypassed_and_does_no_harm_when_it_returns(controller):
    hops = await under_way(controller, 4, 0, 1, 2, 3)
    os.kill(controller.pids[1], signal.SIGSTOP)
    await bypass(controller, 4, hops, 1, head=0, above_tail=2)
    said = await controller.stored(4, 2, 3)
    assert said[2].received_bytes == said[3].received_bytes == FULL_BYTES  # nothing came twice
    os.kill(controller.pids[1], signal.SIGCONT)
    controller.publish(5)
    await controller.chain(5, 0, 2, 3, 1)
    await controller.stored(5, 1, 2, 3)
    for relay in (2, 3):
        with controller.store(relay).open(4) as reader:
            assert np.array_equal(reader.buffer, contents(4))


async def a_killed_relay_is_bypassed(controller):
    hops = await under_way(controller, 6, 0, 1, 2, 3)
    os.kill(controller.pids[1], signal.SIGKILL)
    await bypass(controller, 6, hops, 1, head=0, above_tail=2)
    said = await controller.stored(6, 2, 3)
    assert said[2].received_bytes == said[3].received_bytes == FULL_BYTES


async def the_master_is_killed_and_another_holder_serves(controller):
    controller.publish(7)
    controller.publish(7, rank=2)
    async with Link(controller.joined[3].address, hold_at=4 * CHUNK_BYTES + CHUNK_BYTES // 2) as address:
        await controller.chain(7, 0, 3, addresses={(0, 3): address})
        await controller.progress(3, 4)
        os.kill(controller.pids[0], signal.SIGKILL)
    while True:
        relay, failed = await controller.next(HopFailed, WeightsStored)
        if relay == 3:
            break
    assert (failed.policy_version, failed.peer) == (7, "relay-0")
    await controller.chain(7, 2, 3)
    said = await controller.stored(7, 2, 3)
    assert said[2].received_bytes == 0
    assert said[3].received_bytes == FULL_BYTES


async def test_relays_of_a_world_and_one_that_joins_it_live_through_everything(controller):
    with world(controller, 3) as mpirun, alone(controller, 3):
        await controller.relays(0, 1, 2, 3)
        assert controller.ready[1].startswith("relay 1 of 3, Open MPI")
        assert len({controller.joined[rank].world for rank in range(3)}) == 1
        assert [controller.joined[rank].world_rank for rank in range(4)] == [0, 1, 2, -1]
        await versions_arrive(controller)
        await a_late_relay_joins_by_tcp_over_a_bad_link(controller)
        await a_stopped_relay_is_bypassed_and_does_no_harm_when_it_returns(controller)
        await a_killed_relay_is_bypassed(controller)
        await the_master_is_killed_and_another_holder_serves(controller)
        relay = os.pidfd_open(controller.pids[2])
        mpirun.kill()
        await ends(relay)
        os.kill(controller.pids[3], 0)  # it was never mpirun's


async def test_relays_without_mpi_carry_heal_and_end_cleanly(controller):
    controller.config = config(transport="tcp")
    with world(controller, 3) as mpirun:
        await controller.relays(0, 1, 2)
        assert {(joined.world, joined.library) for joined in controller.joined.values()} == {("", "")}
        await versions_arrive(controller)
        hops = await under_way(controller, 4, 0, 1, 2)
        os.kill(controller.pids[1], signal.SIGSTOP)
        await bypass(controller, 4, hops, 1, head=0, above_tail=2)
        said = await controller.stored(4, 2)
        assert said[2].received_bytes == FULL_BYTES
        os.kill(controller.pids[1], signal.SIGCONT)
        controller.publish(5)
        await controller.chain(5, 0, 2, 1)
        await controller.stored(5, 1, 2)
        for peer in controller.peers.values():
            await controller.channel.send(peer, Shutdown(reason="test"))
        assert await asyncio.to_thread(mpirun.wait, 30) == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(mpirun.pid, 0)
        assert list((controller.memory / "mpi").iterdir()) == []


async def test_a_relay_takes_over_what_is_sound_in_its_store(controller):
    for version in range(3):
        controller.publish(version, rank=5)
    store = controller.store(5)
    store.path(1).write_bytes(b"damaged")
    (store.directory / ".version-00000003.weights.partial").write_bytes(b"half")
    with alone(controller, 5):
        await controller.relays(5)
        assert controller.joined[5].versions == (0, 2)
        assert sorted(path.name for path in store.directory.iterdir()) == [store.path(v).name for v in (0, 2)]


async def test_a_relay_without_room_says_so_before_it_takes_part(controller):
    controller.version_bytes = 1 << 50
    with alone(controller, 5) as relay:
        _, failed = await controller.next(WorkerFailed)
        assert failed.user_error
        assert "relay.keep_versions" in failed.error
        assert await asyncio.to_thread(relay.wait, 30) == 2
    assert controller.joined == {}


@pytest.fixture(params=["has ended", "is another process than the parent"])
def former_parent(request):
    """Pid that the parent had when a relay began."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if request.param == "has ended":
        process.communicate(timeout=30)
    yield process.pid
    process.communicate(timeout=30)


async def test_an_mpirun_that_ended_before_anybody_watched_is_noticed(former_parent):
    with pytest.raises(RunFailed, match="mpirun, or its daemon on this host, has ended"):
        await asyncio.wait_for(_watch_mpirun(former_parent), 10)


async def test_a_living_mpirun_is_watched():
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_watch_mpirun(os.getppid()), 0.05)


def test_a_relay_without_mpirun_needs_an_index(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "laminar.workers.relay.main", "--connect", tmp_path],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "--index" in result.stderr


def test_a_relay_imports_no_torch():
    code = "import sys, laminar.workers.relay.main; sys.exit('torch' in sys.modules or 'mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0

"""Two relay processes under mpirun, with the test in the controller's place."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from laminar.config.schema import ExperimentConfig
from laminar.protocol.connection import Connection, CurveKeys
from laminar.protocol.messages import (
    Broadcast,
    BroadcastFailed,
    Heartbeat,
    Hello,
    Progress,
    Ready,
    Shutdown,
    WeightsStored,
    Welcome,
)
from laminar.protocol.zeromq import ZmqControllerChannel
from laminar.weights import run_memory
from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore

ROOT = Path(__file__).parents[3]
CONFIG = ExperimentConfig.model_validate(
    {
        "name": "relays",
        "model": {"path": "none"},
        "data": {"source": {"type": "jsonl", "path": "none"}},
        "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        "relay": {"keep_versions": 2},
    }
)
LAYOUT = WeightLayout.plan([("w", "uint8", (3 << 20,))])

pytestmark = pytest.mark.timeout(120)


class Controller:
    """As much of a controller as two relays need."""

    def __init__(self, run_dir):
        self.run_id = f"test-{uuid.uuid4().hex[:12]}"
        self.memory = run_memory.claim(self.run_id)
        self.peers = {}
        self.pids = {}
        keys, workers = CurveKeys.create(), CurveKeys.create()
        self.channel = ZmqControllerChannel("127.0.0.1", 0, controller_keys=keys, worker_public_key=workers.public)
        Connection.to_this_process(self.channel.address, self.run_id, controller=keys, worker=workers).write(run_dir)
        self.run_dir = run_dir

    def store(self, rank):
        return WeightStore(self.run_id, f"relay-{rank}")

    async def next(self):
        """The next message that is neither heartbeat nor progress, with the relay's rank; new relays are let in."""
        while True:
            peer, message = await asyncio.wait_for(self.channel.receive(), 60)
            if isinstance(message, Hello):
                self.peers[peer] = message.index
                self.pids[message.index] = message.pid
                welcome = Welcome(
                    run_id=self.run_id,
                    run_dir=str(self.run_dir),
                    config=CONFIG.model_dump_json(),
                    store=f"relay-{message.index}",
                )
                await self.channel.send(peer, welcome)
            elif not isinstance(message, Heartbeat | Progress):
                return self.peers[peer], message

    async def send_all(self, message):
        for peer in self.peers:
            await self.channel.send(peer, message)

    def publish(self, version):
        writer = self.store(0).begin(version, LAYOUT)
        writer.buffer[:] = version
        writer.commit()

    async def broadcast(self, version, deadline_s=30.0):
        """Both relays' answers, by rank."""
        order = Broadcast(
            policy_version=version, chain=(0, 1), chunk_bytes=1 << 20, epoch=version + 1, deadline_s=deadline_s
        )
        await self.send_all(order)
        answers = [await self.next(), await self.next()]
        return dict(answers)


@pytest.fixture
async def controller(tmp_path):
    controller = Controller(tmp_path)
    yield controller
    controller.channel.close()
    run_memory.remove(controller.run_id)


def start_relays(controller, *extra):
    mpi_directory = controller.memory / "mpi"
    mpi_directory.mkdir()
    command = [Path(sys.executable).with_name("mpirun"), "--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe"]
    command += ["--bind-to", "none", "--prtemca", "prte_tmpdir_base", mpi_directory]
    command += ["--mca", "btl_sm_backing_directory", mpi_directory, "-n", "2", sys.executable]
    command += ["-m", "laminar.workers.relay.main", "--connect", controller.run_dir]
    return subprocess.Popen(
        [str(part) for part in command], env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True
    )


async def test_versions_arrive_errors_are_reported_and_everything_ends(controller):
    mpirun = start_relays(controller)
    try:
        ready = dict([await controller.next(), await controller.next()])
        assert all(isinstance(message, Ready) for message in ready.values())
        assert ready[1].detail.startswith("relay 1 of 2, Open MPI")

        for version in range(4):
            controller.publish(version)
            answers = await controller.broadcast(version)
            for message in answers.values():
                assert isinstance(message, WeightsStored), message
                assert (message.policy_version, message.nbytes, message.chunks) == (version, 3 << 20, 3)
                assert 0 < message.seconds < 30
            with controller.store(1).open(version) as reader:
                assert (reader.buffer == np.uint8(version)).all()
        assert controller.store(1).versions() == [2, 3]

        answers = await controller.broadcast(9, deadline_s=0.5)
        assert all(isinstance(message, BroadcastFailed) for message in answers.values())
        assert "does not hold version 9" in answers[0].error
        assert "within 0.5 s: relay 0 has sent 0 of ? chunks" in answers[1].error

        controller.publish(10)
        assert all(isinstance(message, WeightsStored) for message in (await controller.broadcast(10)).values())

        await controller.send_all(Shutdown(reason="test"))
        assert await asyncio.to_thread(mpirun.wait, 30) == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(mpirun.pid, 0)
        assert list((controller.memory / "mpi").iterdir()) == []
    finally:
        if mpirun.poll() is None:
            os.killpg(mpirun.pid, 9)
            mpirun.wait()


async def test_relays_end_with_their_mpirun(controller):
    mpirun = start_relays(controller)
    try:
        ready = [await controller.next(), await controller.next()]
        assert all(isinstance(message, Ready) for _, message in ready)
        relays = [os.pidfd_open(pid) for pid in controller.pids.values()]
    finally:
        mpirun.kill()
        mpirun.wait()
    for relay in relays:  # it ends by itself, or Open MPI ends it: whoever notices first
        assert (await asyncio.to_thread(select.select, [relay], [], [], 10))[0], "a relay outlived its mpirun"
        os.close(relay)


def test_a_relay_started_without_mpirun_says_how(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
    result = subprocess.run(
        [sys.executable, "-m", "laminar.workers.relay.main", "--connect", tmp_path],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "mpirun" in result.stderr


def test_a_relay_imports_no_torch():
    code = "import sys, laminar.workers.relay.main; sys.exit('torch' in sys.modules or 'mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0

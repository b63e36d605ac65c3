from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from laminar.protocol.connection import Connection, CurveKeys
from laminar.protocol.messages import (
    CheckpointSaved,
    Heartbeat,
    Hello,
    Progress,
    PublishWeights,
    Ready,
    SaveCheckpoint,
    Shutdown,
    StepTrained,
    WeightsPublished,
    Welcome,
    WorkerFailed,
)
from laminar.protocol.zeromq import ZmqControllerChannel
from laminar.weights import run_memory
from laminar.weights.store import WeightStore
from laminar.weights.tensors import read_tensors
from tests.workers.trainer.batches import random_step

ROOT = Path(__file__).parents[3]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
LIMIT_S = 90


class StandInController:
    """Lets ranks in, sends each of them the same messages, and sorts what they answer."""

    def __init__(self, run_dir: Path, config):
        self.run_id = f"test-{uuid.uuid4().hex[:12]}"
        self.config = config
        self.run_dir = run_dir
        keys, self._worker_keys = CurveKeys.create(), CurveKeys.create()
        self._channel = ZmqControllerChannel(
            "127.0.0.1", 0, controller_keys=keys, worker_public_key=self._worker_keys.public
        )
        Connection.to_this_process(self._channel.address, self.run_id, controller=keys, worker=self._worker_keys).write(
            run_dir
        )
        self.ranks: dict[bytes, int] = {}
        self.heartbeats = 0
        self._early = []

    async def start(self, *command):
        # One thread, and no RANK from anything around the tests.
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            "--connect",
            str(self.run_dir),
            env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def expect(self, kind, number):
        """`number` answers of a kind, by rank; others are kept for later, as ranks do not wait for each other."""
        answers = {rank: message for rank, message in self._early if isinstance(message, kind)}
        self._early = [entry for entry in self._early if not isinstance(entry[1], kind)]
        async with asyncio.timeout(LIMIT_S):
            while len(answers) < number:
                peer, message = await self._channel.receive()
                match message:
                    case Hello(kind="trainer", index=index):
                        self.ranks[peer] = index
                        await self._channel.send(
                            peer,
                            Welcome(
                                run_id=self.run_id,
                                run_dir=str(self.run_dir),
                                config=self.config.model_dump_json(),
                                store="relay-0",
                                hop_key=b"",
                                version_bytes=0,
                            ),
                        )
                    case Heartbeat():
                        self.heartbeats += 1
                    case Progress():
                        pass
                    case kind():
                        answers[self.ranks[peer]] = message
                    case WorkerFailed():
                        pytest.fail(message.error)
                    case _:
                        self._early.append((self.ranks[peer], message))
        return answers

    async def send(self, message):
        for peer in self.ranks:
            await self._channel.send(peer, message)

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        self._channel.close()
        run_memory.remove(self.run_id)


@pytest.fixture
async def controller(tmp_path):
    made = []

    def make(config):
        made.append(StandInController(tmp_path, config))
        return made[-1]

    yield make
    for controller in made:
        controller.close()


@pytest.mark.asyncio
async def test_two_ranks_train_publish_and_write_a_checkpoint(controller, make_config, tmp_path):
    controller = controller(make_config(ranks=2))
    await controller.start(*TORCHRUN, "laminar.workers.trainer.main")
    ready = await controller.expect(Ready, 2)
    assert ready.keys() == {0, 1}
    assert "2 ranks, data_parallel" in ready[1].detail

    await controller.send(PublishWeights(order=1, policy_version=0))
    published = await controller.expect(WeightsPublished, 1)
    assert published.keys() == {0}
    store = WeightStore(controller.run_id, "relay-0")
    assert store.versions() == [0]

    await controller.send(random_step(1, order=2))
    trained = await controller.expect(StepTrained, 2)
    assert trained[0].metrics == trained[1].metrics
    assert trained[0].seconds > 0
    published = await controller.expect(WeightsPublished, 1)
    assert published.keys() == {0}
    assert published[0].policy_version == 1
    assert published[0].nbytes == store.open(1).layout.total_bytes

    path = tmp_path / "checkpoints" / "step-1"
    await controller.send(SaveCheckpoint(order=3, step=1, policy_version=1, path=str(path), state="{}"))
    saved = await controller.expect(CheckpointSaved, 2)
    assert all(answer.error == "" and answer.nbytes > 0 for answer in saved.values())
    exported = load_file(path / "huggingface" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in read_tensors(store.path(1)))

    await controller.send(Shutdown(reason="done"))
    async with asyncio.timeout(LIMIT_S):
        assert await controller.process.wait() == 0
    assert controller.heartbeats > 0


@pytest.mark.asyncio
async def test_missing_model_is_the_users_error(controller, make_config):
    controller = controller(make_config(path="/nowhere/at/all"))
    await controller.start("-m", "laminar.workers.trainer.main")
    failed = await controller.expect(WorkerFailed, 1)
    assert failed[0].user_error
    assert "model.path" in failed[0].error
    assert "/nowhere/at/all" in failed[0].error
    async with asyncio.timeout(LIMIT_S):
        assert await controller.process.wait() == 2

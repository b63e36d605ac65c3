"""A real environment worker process, and the controller's end of its line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from laminar.config.schema import ExperimentConfig
from laminar.protocol.connection import Connection, CurveKeys
from laminar.protocol.messages import Heartbeat, Hello, Progress, Ready, Shutdown, Welcome
from laminar.protocol.zeromq import ZmqControllerChannel
from tests.tiny_models import make_tokenizer

LIMIT_S = 60.0
REPOSITORY = Path(__file__).parents[3]


class EnvironmentProcess:
    """One worker, run in the user's project folder."""

    def __init__(self, channel: ZmqControllerChannel, process: asyncio.subprocess.Process, peer: bytes) -> None:
        self._channel = channel
        self._process = process
        self._peer = peer
        self.progress: list[str] = []
        self.heartbeats = 0

    async def send(self, message: object) -> None:
        await self._channel.send(self._peer, message)

    async def receive(self) -> Any:
        """Next message that is neither a heartbeat nor a progress line."""
        while True:
            message = await self.receive_any()
            if not isinstance(message, Heartbeat | Progress):
                return message

    async def receive_any(self) -> Any:
        _, message = await asyncio.wait_for(self._channel.receive(), LIMIT_S)
        if isinstance(message, Progress):
            self.progress.append(message.text)
        self.heartbeats += isinstance(message, Heartbeat)
        return message

    async def ask(self, message: object) -> Any:
        await self.send(message)
        return await self.receive()

    async def shut_down(self) -> int:
        await self.send(Shutdown(reason="the test is over"))
        return await self.exit_status()

    async def exit_status(self) -> int:
        return await asyncio.wait_for(self._process.wait(), LIMIT_S)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with a tokenizer in `model`."""
    make_tokenizer(tmp_path / "model")
    return tmp_path


@pytest.fixture
async def start(project: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await start(data=..., function=..., **environment_variables)`: a worker that has been welcomed."""
    channels: list[ZmqControllerChannel] = []
    processes: list[asyncio.subprocess.Process] = []

    async def start_worker(
        *,
        data: dict[str, Any],
        function: str = "reasoning_gym",
        model: str = "model",
        evaluation: dict[str, Any] | None = None,
        environment: dict[str, Any] | None = None,
        **variables: str,
    ) -> EnvironmentProcess:
        config = ExperimentConfig.model_validate(
            {
                "name": "test",
                "model": {"path": model},
                "data": data,
                "reward": {"function": function},
                "evaluation": evaluation,
                "environment": environment or {},
                "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2},
                "controller": {"heartbeat_s": 0.05},
            }
        )
        controller_keys, worker_keys = CurveKeys.create(), CurveKeys.create()
        channel = ZmqControllerChannel(
            "127.0.0.1", 0, controller_keys=controller_keys, worker_public_key=worker_keys.public
        )
        channels.append(channel)
        run_dir = project / f"run-{len(channels)}"
        run_dir.mkdir()
        Connection.to_this_process(channel.address, "r", controller=controller_keys, worker=worker_keys).write(run_dir)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "laminar.workers.environment.main", "--connect", str(run_dir), "--index", "3"),
            cwd=project,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **variables},
        )
        processes.append(process)
        peer, hello = await asyncio.wait_for(channel.receive(), LIMIT_S)
        assert isinstance(hello, Hello)
        assert (hello.kind, hello.index, hello.pid) == ("environment", 3, process.pid)
        await channel.send(
            peer,
            Welcome(
                run_id="r",
                run_dir=str(run_dir),
                config=config.model_dump_json(),
                store="",
                hop_key=b"",
                version_bytes=0,
            ),
        )
        return EnvironmentProcess(channel, process, peer)

    yield start_worker
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()
    for channel in channels:
        channel.close()


@pytest.fixture
def start_ready(start: Callable[..., Any]) -> Callable[..., Any]:
    """Like `start`, for a worker that can take work."""

    async def start_worker(**given: Any) -> EnvironmentProcess:
        worker = await start(**given)
        message = await worker.receive()
        assert isinstance(message, Ready), message
        return worker

    return start_worker


@pytest.fixture
def jsonl(project: Path) -> Callable[..., dict[str, Any]]:
    """Write a data file and return `data.source` for it."""

    def write(*lines: dict[str, Any]) -> dict[str, Any]:
        (project / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {"type": "jsonl", "path": "data.jsonl"}

    return write

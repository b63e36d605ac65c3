"""A relay tier without a run: real relays under mpirun, the controller's own part of them, and made-up weights."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from laminar.config.schema import ExperimentConfig
from laminar.controller.relay import MASTER, store_name
from laminar.controller.relay_keeper import TIER, RelayKeeper
from laminar.controller.relay_manager import TRAINER, RelayManager
from laminar.controller.worker_registry import WorkerRegistry
from laminar.launch.commands import mpirun
from laminar.observability.events import EventBus, Notice, WeightsBroadcast
from laminar.protocol.connection import Connection, CurveKeys
from laminar.protocol.messages import PublishWeights, Shutdown, WeightsPublished, Welcome, WorkerKind
from laminar.protocol.zeromq import ZmqControllerChannel
from laminar.weights import run_memory
from laminar.weights.checksum import checksum
from laminar.weights.store import WeightStore

START_LIMIT_S = 120.0
BROADCAST_LIMIT_S = 120.0
POLL_S = 0.05
RELAY = [sys.executable, "-m", "laminar.workers.relay.main"]


class RelayTier:
    """`async with RelayTier(...)`: all is started, and nothing is left afterwards."""

    def __init__(self, relays: int, nbytes: int, **options: object) -> None:
        """`nbytes` of a version, a multiple of 64; `options` of the config's section `relay`."""
        self.config = ExperimentConfig.model_validate(
            {
                "name": "relay-tier",
                "model": {"path": "none"},
                "data": {"source": {"type": "jsonl", "path": "none"}},
                "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2},
                "relay": {"count": relays, "restarts": 1000, **options},
            }
        )
        self.notices: list[str] = []
        self.broadcasts: list[WeightsBroadcast] = []
        self._broadcast_ended = asyncio.Event()
        self.version = -1
        self._nbytes = nbytes
        self._run_id = f"tier-{uuid.uuid4().hex[:8]}"
        self._folder = tempfile.TemporaryDirectory()
        self._run_dir = Path(self._folder.name)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._key = os.urandom(32)

    async def __aenter__(self) -> Self:
        run_memory.claim(self._run_id)
        keys, workers = CurveKeys.create(), CurveKeys.create()
        self._channel = ZmqControllerChannel("127.0.0.1", 0, controller_keys=keys, worker_public_key=workers.public)
        Connection.to_this_process(self._channel.address, self._run_id, controller=keys, worker=workers).write(
            self._run_dir
        )
        events = EventBus()
        events.subscribe(lambda event: self.notices.append(event.text), Notice)
        events.subscribe(self._on_broadcast, WeightsBroadcast)
        names = [f"relay-{rank}" for rank in range(self.config.relay.count)]
        self.registry = WorkerRegistry(
            self._channel,
            events,
            expected=[*names, TRAINER],
            welcome=self._welcome,
            heartbeat_s=self.config.controller.heartbeat_s,
            silence_limit_s=self.config.controller.silence_limit_s,
            start_limit_s=60.0,
        )
        self.manager = RelayManager(self.registry, events, self.config)
        self.keeper = RelayKeeper(self.registry, events, self.manager, self.config, restart=self._restart)
        self._tasks = [
            asyncio.create_task(self.registry.receive_forever(), name="receive"),
            asyncio.create_task(self.registry.heartbeat_forever(), name="heartbeats"),
            asyncio.create_task(self.manager.broadcast_forever(), name="relay manager"),
            asyncio.create_task(self.keeper.keep_forever(), name="relay keeper"),
        ]
        self._start_publisher()
        self._start_world()
        await self.registry.wait_until_ready(START_LIMIT_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.registry.send_all(Shutdown(reason="done"))
        for process in self._processes:
            try:
                await asyncio.to_thread(process.wait, 10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._channel.close()
        run_memory.remove(self._run_id)
        self._folder.cleanup()

    async def publish(self) -> WeightsPublished:
        """The next version into the master relay's store; its broadcast begins."""
        self.version += 1
        answer: WeightsPublished = await self.registry.ask(
            TRAINER,
            PublishWeights(order=self.version + 1, policy_version=self.version),
            WeightsPublished,
            START_LIMIT_S,
        )
        self.manager.published(self.version)
        return answer

    async def until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait until something is so of the relays: who is there, and what they hold."""
        changed = asyncio.Event()
        self.manager.on_change = lambda relay: changed.set()
        async with asyncio.timeout(limit_s):
            while not condition():
                changed.clear()
                await changed.wait()

    async def everywhere(self, names: set[str] | None = None) -> None:
        """Wait until these relays, or all that are there, hold the newest version."""

        def hold() -> bool:
            there = {relay.name: relay for relay in self.manager.present()}
            wanted = there.keys() if names is None else names
            return bool(wanted) and all(name in there and there[name].holds(self.version) for name in wanted)

        await self.until(hold, BROADCAST_LIMIT_S)

    async def broadcast_over(self, version: int) -> WeightsBroadcast:
        """Wait until the broadcast of this version is over."""
        async with asyncio.timeout(BROADCAST_LIMIT_S):
            while not (over := [b for b in self.broadcasts if b.policy_version == version]):
                self._broadcast_ended.clear()
                await self._broadcast_ended.wait()
        return over[0]

    async def memory_ready(self) -> None:
        """Wait until all have memory for the next version, as in a run, where a step takes longer than that."""
        stores = {store_name(relay.rank) for relay in self.manager.present()} | {store_name(MASTER)}
        async with asyncio.timeout(BROADCAST_LIMIT_S):
            while not all(self._is_ready(store) for store in stores):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)  # the memory of other processes tells nobody

    def _is_ready(self, store: str) -> bool:
        prepared = (run_memory.run_directory(self._run_id) / store).glob(".prepared-*.partial")
        return any(path.stat().st_blocks * 512 >= self._nbytes for path in prepared)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker's process."""
        os.kill(self.registry.workers[name].pid, number)

    def checksum(self, rank: int, version: int) -> int:
        """Of what a relay's store holds as this version."""
        with WeightStore(self._run_id, store_name(rank)).open(version) as reader:
            return checksum(reader.buffer)

    def _on_broadcast(self, event: WeightsBroadcast) -> None:
        self.broadcasts.append(event)
        self._broadcast_ended.set()

    def _welcome(self, kind: WorkerKind, index: int) -> Welcome:
        return Welcome(
            run_id=self._run_id,
            run_dir=str(self._run_dir),
            config=self.config.model_dump_json(),
            store=store_name(MASTER if kind == "trainer" else index),
            hop_key=self._key,
            version_bytes=self._nbytes,
        )

    def _start_publisher(self) -> None:
        self._start([sys.executable, str(Path(__file__).with_name("publisher.py")), "--connect", str(self._run_dir)])

    def _start_world(self) -> None:
        directory = run_memory.run_directory(self._run_id) / f"mpi-{len(self._processes)}"
        directory.mkdir()
        self._start([*mpirun(directory, self.config.relay.count), *RELAY, "--connect", str(self._run_dir)])

    async def _restart(self, name: str, reason: str) -> None:
        if name == TIER:
            self._start_world()
        else:
            self._start([*RELAY, "--connect", str(self._run_dir), "--index", name.removeprefix("relay-")])

    def _start(self, command: list[str]) -> None:
        root = str(Path(__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        log = (self._run_dir / f"{len(self._processes)}.log").open("wb")
        with log:
            self._processes.append(
                subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=log)
            )

    def logs(self) -> str:
        """Everything that the processes have said."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._run_dir.glob("*.log")))

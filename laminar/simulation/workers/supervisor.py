"""What a launcher is to real workers: starts them, notices that a process has ended, and starts lost ones anew.

Invariants: one process at most lives under a worker's name; each has a peer name of its own on the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from laminar.controller.worker_registry import WorkerRegistry
from laminar.errors import RunFailed
from laminar.simulation.workers.modelled_worker import ModelledWorker

Start = Callable[[str, int], ModelledWorker]  # (worker's name, number of the process) -> the process


class Supervisor:
    """The processes of one run. `failure` is set when one ended before the run could begin: await it beside the run."""

    def __init__(self, start: Start, *, restart_s: float, notice_s: float, hang_limit_s: float) -> None:
        """
        Args:
            start: makes a worker's process; its host may depend on the number.
            restart_s: from the decision to start a process to its Hello.
            notice_s: from the end of a process to the report.
            hang_limit_s: a relay that hangs for longer is killed; of the other workers the controller sees to that.
        """
        self.workers: dict[str, ModelledWorker] = {}  # newest process of each
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_started: Callable[[ModelledWorker], None] = lambda worker: None
        self._start = start
        self._restart_s = restart_s
        self._notice_s = notice_s
        self._hang_limit_s = hang_limit_s
        self._numbers: dict[str, int] = {}
        self._registry: WorkerRegistry | None = None
        self._ending = False

    def watch_for(self, registry: WorkerRegistry) -> None:
        """Report ended processes there."""
        self._registry = registry

    def start(self, name: str) -> ModelledWorker:
        """Start a worker's next process now; the one before must have ended."""
        self._numbers[name] = self._numbers.get(name, 0) + 1
        worker = self.workers[name] = self._start(name, self._numbers[name])
        worker.on_ended = self._ended
        if worker.kind == "relay":
            worker.on_hung = self._hung
        self.on_started(worker)
        return worker

    async def restart(self, name: str, reason: str) -> None:
        """For the controller: end what is left of a lost worker and start it anew; "trainer" stands for all ranks."""
        names = [name]
        if name == "trainer":
            names = [rank for rank, worker in self.workers.items() if worker.kind == "trainer"]
        for one in names:
            self._kill_unreported(one)
        await asyncio.sleep(self._restart_s)
        for one in names:
            self.start(one)

    def end(self) -> None:
        """The run is over: processes that end are not reported any more."""
        self._ending = True
        self.failure.cancel()
        for worker in self.workers.values():
            worker.kill("the run is over")

    def _kill_unreported(self, name: str) -> None:
        worker = self.workers[name]
        worker.on_ended = lambda worker, reason: None
        worker.kill("it is started anew")

    def _ended(self, worker: ModelledWorker, reason: str) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + self._notice_s, self._report, worker, reason)

    def _hung(self, worker: ModelledWorker) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + self._hang_limit_s, lambda: worker.kill("it hung") if worker.hung else None)

    def _report(self, worker: ModelledWorker, reason: str) -> None:
        """As the launcher does: the controller decides what a worker's loss means."""
        if self._ending or self._registry is None or self.failure.done():
            return
        known = self._registry.workers.get(worker.name)
        try:
            if known is not None and known.peer == worker.peer.encode():
                self._registry.lost(worker.name, f"its process ended ({reason})")
            elif not worker.welcomed and self._registry.expects(worker.name):
                self._registry.did_not_come(worker.name, f"its process ended ({reason})")
            # Else the controller has given it up before, and waits for its successor or goes on without it.
        except RunFailed as error:
            self.failure.set_exception(error)
            return
        if worker.kind == "relay" and self.workers[worker.name] is worker:
            loop = asyncio.get_running_loop()
            loop.call_at(loop.time() + self._restart_s, self._bring_relay_back, worker)

    def _bring_relay_back(self, worker: ModelledWorker) -> None:
        if not self._ending and self.workers[worker.name] is worker:
            self.start(worker.name)

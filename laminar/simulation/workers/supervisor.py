"""What a launcher is to real workers: starts them, notices that a process has ended, and starts lost ones anew.

Invariants: one process at most lives under a worker's name; each has a peer name of its own on the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from laminar.controller.relay_keeper import TIER, RelayKeeper
from laminar.controller.worker_registry import WorkerRegistry
from laminar.errors import RunFailed
from laminar.simulation.workers.modelled_worker import ModelledWorker

# (worker's name, number of the process, mpirun world or empty) -> the process
Start = Callable[[str, int, str], ModelledWorker]


class Supervisor:
    """The processes of one run. `failure` is set when one ended before the run could begin: await it beside the run."""

    def __init__(self, start: Start, *, restart_s: float, notice_s: float) -> None:
        """
        Args:
            start: makes a worker's process; its host may depend on the number.
            restart_s: from the decision to start a process to its Hello.
            notice_s: from the end of a process to the report.
        """
        self.workers: dict[str, ModelledWorker] = {}  # newest process of each
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_started: Callable[[ModelledWorker], None] = lambda worker: None
        self._start = start
        self._restart_s = restart_s
        self._notice_s = notice_s
        self._numbers: dict[str, int] = {}
        self._worlds = 1  # of relays that were started together
        self._registry: WorkerRegistry | None = None
        self._keeper: RelayKeeper | None = None
        self._ending = False

    def watch_for(self, registry: WorkerRegistry | None, keeper: RelayKeeper | None) -> None:
        """Report ended processes there; to nobody while there is no controller."""
        self._registry, self._keeper = registry, keeper

    def start(self, name: str, *, alone: bool = False) -> ModelledWorker:
        """Start a worker's next process now; the one before must have ended. `alone`: a relay outside of mpirun."""
        self._numbers[name] = self._numbers.get(name, 0) + 1
        worker = self.workers[name] = self._start(name, self._numbers[name], "" if alone else f"mpirun-{self._worlds}")
        worker.on_ended = self._ended
        self.on_started(worker)
        return worker

    async def restart(self, name: str, reason: str) -> None:
        """For the controller: end what is left of a lost worker and start it anew; "trainer" and "relays" stand for all."""
        kind = {"trainer": "trainer", TIER: "relay"}.get(name, "")
        names = [one for one, worker in self.workers.items() if worker.kind == kind] if kind else [name]
        for one in names:
            self._kill_unreported(one)
        await asyncio.sleep(self._restart_s)
        self._worlds += name == TIER
        for one in names:
            self.start(one, alone=name != TIER)

    def lose_tier(self) -> list[ModelledWorker]:
        """mpirun ends, and every relay that it had started with it. Returns those."""
        world = f"mpirun-{self._worlds}"
        ended = [worker for worker in self.workers.values() if worker.alive and getattr(worker, "world", "") == world]
        if not ended:
            return []  # no mpirun of the tier runs at the moment
        for worker in ended:
            worker.kill("mpirun has ended")
        if ended:  # else it has ended before
            loop = asyncio.get_running_loop()
            loop.call_at(loop.time() + self._notice_s, self._report_tier)
        return ended

    def end(self) -> None:
        """The run is over: processes that end are not reported any more."""
        self._ending = True
        self.failure.cancel()
        for worker in self.workers.values():
            worker.kill("the run is over")

    def _kill_unreported(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is None:
            return  # it has never been started
        worker.on_ended = lambda worker, reason: None
        worker.kill("it is started anew")

    def _ended(self, worker: ModelledWorker, reason: str) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + self._notice_s, self._report, worker, reason)

    def _report_tier(self) -> None:
        if not self._ending and self._keeper is not None:
            self._keeper.tier_lost("mpirun has ended")

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

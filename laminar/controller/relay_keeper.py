"""Brings lost relays back: one by its own command, all of them together when their mpirun has ended.

Invariant: a relay that was lost is being brought back, or is here again.
Nobody waits for it: the chain is mended without, and rollouts pull what its host's memory holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable

from laminar.config.schema import ExperimentConfig
from laminar.controller.relay_manager import RelayManager
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import EventBus, Notice, WeightsBroadcast, WeightsPublished, WorkerReplaced

REST_S = 30.0  # between attempts at a relay whose restarts are used up
TIER = "relays"  # what `restart` is asked for when all are to be started together


class RelayKeeper:
    """One coroutine, `keep_forever`; a task per restart that is under way."""

    def __init__(
        self,
        registry: WorkerRegistry,
        events: EventBus,
        manager: RelayManager,
        config: ExperimentConfig,
        *,
        restart: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """`restart` starts "relay-2", or "relays" for the whole tier; those started by hand are only waited for."""
        self._registry = registry
        self._events = events
        self._manager = manager
        self._restart = restart
        self._tier = [f"relay-{rank}" for rank in range(config.relay.count)]
        self._max_restarts = config.relay.restarts
        self._limit_s = config.controller.start_timeout_s
        self._awaited: dict[str, str] = {}  # may come by themselves, within
        self._patience_s: Callable[[str], float] = lambda name: 0.0
        self._by_hand = config.launch.relays == "manual"  # whoever started them brings them back (relays.sh)
        self._due = asyncio.Event()
        self._lost: dict[str, str] = {}  # to be brought back -> why
        self._tier_lost = ""  # why the whole tier is to be started anew
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._resting: dict[str, None] = {}  # cannot be started at the moment
        self._restarts: Counter[str] = Counter()  # since the last broadcast that reached all
        self._were_ready: dict[str, None] = {}
        registry.on_lost("relay", self._on_lost)
        events.subscribe(self._on_broadcast, WeightsBroadcast)
        events.subscribe(self._on_published, WeightsPublished)

    def tier_lost(self, reason: str) -> None:
        """What keeps the relays together (mpirun) has ended, and they end with it."""
        self._tier_lost = reason
        self._due.set()

    def await_back(self, patience_s: Callable[[str], float]) -> None:
        """An earlier controller knew all relays: who is not back within the time is started anew."""
        self._were_ready = dict.fromkeys(self._tier)
        self._lost = dict.fromkeys(self._tier, "it has not come back to the new controller")
        self._awaited, self._patience_s = dict(self._lost), patience_s
        self._due.set()

    async def keep_forever(self) -> None:
        """Bring back what is lost. Waits for losses; each restart has the limit of a start.

        Raises:
            RunFailed: no relay is left, and none can be started.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                await self._due.wait()
                self._due.clear()
                if self._tier_lost:
                    reason, self._tier_lost = self._tier_lost, ""
                    for what, task in self._under_way.items():
                        task.cancel()
                        if what != TIER:  # one of the tier, about to be started alone: no attempt of its own
                            self._restarts[what] = max(self._restarts[what] - 1, 0)
                    self._under_way.clear()
                    self._lost.clear()
                    self._start(group, TIER, self._tier, reason)
                elif TIER not in self._under_way:
                    for name, reason in self._lost.items():
                        self._start(group, name, [name], reason)
                    self._lost.clear()

    def _start(self, group: asyncio.TaskGroup, what: str, names: list[str], reason: str) -> None:
        if what in self._under_way:
            return
        task = self._under_way[what] = group.create_task(self._bring_back(what, names, reason), name=f"restart {what}")
        task.add_done_callback(lambda _: self._ended(what, task))

    def _ended(self, what: str, task: asyncio.Task[None]) -> None:
        if self._under_way.get(what) is task:
            del self._under_way[what]
        self._due.set()  # one may have been lost meanwhile

    async def _bring_back(self, what: str, names: list[str], reason: str) -> None:
        if self._awaited.pop(what, ""):
            with contextlib.suppress(WorkerLost, RunFailed):
                await self._registry.wait_until_ready(self._patience_s(what), names)
        while self._registry.missing(names):
            if self._restarts[what] >= self._max_restarts:
                self._go_on_without(what, reason)
                if what == TIER:
                    return  # others of it may still come; those that were lost are started alone
                await self._rest(what)
            self._restarts[what] += 1
            try:
                if not self._by_hand:
                    self._events.emit(WorkerReplaced(worker=what, reason=reason))
                    await self._restart(what, reason)
                await self._registry.wait_until_ready(self._limit_s, names)
            except (WorkerLost, RunFailed) as error:
                reason = str(error)
        for name in names:
            self._lost.pop(name, None)

    def _go_on_without(self, what: str, reason: str) -> None:
        """Raises RunFailed if it was the last that there was hope for."""
        self._lost.pop(what, None)
        self._resting[what] = None
        if not self._may_come():
            raise RunFailed(f"no relay is left: {what}: {reason} (relay.restarts)")
        del self._resting[what]
        text = f"{what} cannot be started anew: {reason}; going on without"
        self._events.emit(Notice(level="warning", text=text))

    async def _rest(self, what: str) -> None:
        """Let some time pass before another attempt: rollouts depend on it."""
        self._resting[what] = None
        try:
            await asyncio.sleep(REST_S)
        finally:
            del self._resting[what]
        self._restarts[what] = self._max_restarts - 1

    def _may_come(self) -> bool:
        """Whether a relay is there, starts, or can be brought back alone: one of the tier may end while all start."""
        if any(worker.kind == "relay" for worker in self._registry.workers.values()):
            return True
        alone = [name for name in self._lost if self._restarts[name] < self._max_restarts]
        return bool(alone) or any(what not in self._resting for what in self._under_way)

    def _on_lost(self, worker: Worker, reason: str) -> None:
        """Raises WorkerLost if it has never been ready: then it cannot start on this machine."""
        if not self._started(worker):
            raise WorkerLost(f"{worker.name} did not start: {reason}")
        self._manager.lost(worker, reason)
        if worker.name in self._tier:
            self._lost[worker.name] = reason
            self._due.set()

    def _started(self, worker: Worker) -> bool:
        """Whether it has ever been ready, then or before it was last started."""
        if worker.ready:
            self._were_ready[worker.name] = None
        return worker.name in self._were_ready or worker.name not in self._tier

    def _on_broadcast(self, event: WeightsBroadcast) -> None:
        if not event.error:
            self._restarts.clear()

    def _on_published(self, event: WeightsPublished) -> None:
        """A relay that has a version by the publish itself takes part in no broadcast, and is well all the same."""
        present = self._manager.present()
        if all(relay.holds(event.policy_version) for relay in present):
            for relay in present:
                del self._restarts[relay.name]

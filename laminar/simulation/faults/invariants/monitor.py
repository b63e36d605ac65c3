"""All invariants on one run: hands them events and messages, and keeps the first violation.

Invariant: a check runs where its subject is whole: event handlers in the middle of what the controller does see only the
event; recounts run in a callback of their own, between the controller's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from laminar.controller.journal.restore import Restored
from laminar.protocol.messages import Shutdown
from laminar.simulation.cluster import SimulatedRun
from laminar.simulation.faults.event_log import EventLog
from laminar.simulation.faults.fault_schedule import FaultSchedule
from laminar.simulation.faults.injector import Injector
from laminar.simulation.faults.invariants.counts import CountsAddUp
from laminar.simulation.faults.invariants.ending import EndsAsItShould
from laminar.simulation.faults.invariants.evaluations import EvaluationStaysApart
from laminar.simulation.faults.invariants.exported_kv import ExportedKvGoesWithItsTrajectory
from laminar.simulation.faults.invariants.health import OnlyTheHealthyWork
from laminar.simulation.faults.invariants.invariant import Invariant, InvariantViolation, Observed
from laminar.simulation.faults.invariants.leases import LeasesFence, OnePlace
from laminar.simulation.faults.invariants.liveness import SomethingGetsFurther
from laminar.simulation.faults.invariants.losses import LossesHaveCauses
from laminar.simulation.faults.invariants.once import EachPromptEndsOnce
from laminar.simulation.faults.invariants.serving import ServesWhatItLoaded
from laminar.simulation.faults.invariants.trainer_ledger import TrainedOnceWithinTheBound
from laminar.simulation.faults.invariants.versions import OneVersionEachTokenOnce, VersionsGrow


class Monitor:
    """Give `attach` to SimulatedRun as `before`."""

    def __init__(self, schedule: FaultSchedule, injector: Injector, log: EventLog) -> None:
        self.happened: Counter[str] = Counter()  # events, by type
        self._schedule = schedule
        self._injector = injector
        self._log = log
        self._recount_due = False
        self._controller_done = False
        self._invariants: list[Invariant] = []
        self._on_event: dict[type, list[Callable[[Any], None]]] = {}
        self._on_message: dict[type, list[Callable[[str, bool, Any], None]]] = {}
        self._observed: Observed
        self._ending: EndsAsItShould
        self._liveness: SomethingGetsFurther
        self._loop: asyncio.AbstractEventLoop

    def attach(self, run: SimulatedRun) -> None:
        """Watch a run. Called in the loop, before anything has started."""
        self._loop = asyncio.get_running_loop()
        now = self._loop.time
        observed = self._observed = Observed(
            made=run, workload=run.models.workload, prompts=self._schedule.workload.prompts
        )
        ledger = EachPromptEndsOnce(observed)
        losses = LossesHaveCauses(observed, self._injector.strikes, now)
        losses.run_latency_s = self._schedule.workload.latency_s + self._schedule.workload.latency_jitter_s
        self._ending = EndsAsItShould(observed, self._injector.strikes, losses, ledger)
        self._liveness = SomethingGetsFurther(observed, now)
        self._invariants = [
            ledger,
            TrainedOnceWithinTheBound(observed),
            OneVersionEachTokenOnce(observed),
            VersionsGrow(observed),
            LeasesFence(observed),
            OnePlace(observed),
            ServesWhatItLoaded(observed),
            ExportedKvGoesWithItsTrajectory(observed),
            OnlyTheHealthyWork(observed),
            CountsAddUp(observed, ledger),
            EvaluationStaysApart(observed),
            losses,
            self._liveness,
            self._ending,
        ]
        for invariant in self._invariants:
            for kind, on_event in invariant.event_handlers().items():
                self._on_event.setdefault(kind, []).append(on_event)
            for message_type, on_message in invariant.message_handlers().items():
                self._on_message.setdefault(message_type, []).append(on_message)
        run.events.subscribe(self._event)
        run.network._wire.trace = self._delivery
        self._watch(run)

        def taken_up(restored: Restored) -> None:
            self.happened["ControllerRestored"] += 1
            for invariant in self._invariants:
                self._checked(partial(invariant.taken_up, restored))
            self._watch(run)

        run.on_taken_up = taken_up

    def _watch(self, run: SimulatedRun) -> None:
        """Look at calls of the controller that is about to run."""
        for invariant in self._invariants:
            invariant.watch(run.controller)
        controller_run, send = run.controller.run, run.network.controller.send

        async def watched_run(*arguments: Any) -> None:
            before = asyncio.all_tasks()
            try:
                await controller_run(*arguments)
                self._controller_done = True
            finally:
                self._ending.tasks_left = sorted(task.get_name() for task in asyncio.all_tasks() - before)

        def watched_send(peer: bytes, message: object) -> Coroutine[Any, Any, None]:
            if isinstance(message, Shutdown):
                self._ending.told[peer.decode()] = None
            return send(peer, message)

        run.controller.run = watched_run  # type: ignore[method-assign,assignment]
        run.network.controller.send = watched_send  # type: ignore[method-assign]

    # ------------------------------------------------------------ during the run

    def _event(self, event: object) -> None:
        self.happened[type(event).__name__] += 1
        self._log.event(self._loop.time(), event)
        handlers = self._on_event.get(type(event), ())
        self._checked(lambda: [handler(event) for handler in handlers])
        if not self._recount_due:
            self._recount_due = True
            self._loop.call_soon(self._recount)

    def _delivery(self, now: float, route: str, message: object) -> None:
        self._log.message(now, route, message)
        self._injector.on_message(message)
        source, _, target = route.partition(" -> ")
        to_worker = source == "controller"
        peer = target if to_worker else source
        handlers = self._on_message.get(type(message), ())
        self._checked(lambda: [handler(peer, to_worker, message) for handler in handlers])
        self._checked(self._liveness.look)

    def _recount(self) -> None:
        self._recount_due = False
        if self._observed.made.controller_lost.is_set():
            return
        for invariant in self._invariants:
            self._checked(invariant.recount)

    def _checked(self, check: Callable[[], object]) -> None:
        if not self._observed.violations:  # the first counts; what follows from it says nothing
            check()

    # ------------------------------------------------------------ after it

    def judge(self, failure: BaseException | None) -> str:
        """How the run ended, in a few words.

        Raises:
            InvariantViolation: the first one of the run, or the end is one.
        """
        if self._invariants and self._observed.violations:
            raise self._observed.violations[0]
        if not self._invariants:
            raise InvariantViolation("the run ends as it should", f"it did not start: {failure!r}")
        if self._controller_done and isinstance(failure, RuntimeError):
            failure = None  # no step was made, so there are no figures to record; the controller is content
        how = self._ending.judge(failure)
        for invariant in self._invariants:
            if failure is None:
                invariant.recount()
            invariant.at_end()
        return how

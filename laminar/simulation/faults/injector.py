"""Throws the faults of a schedule at a simulated run, and remembers which of them struck whom.

Invariant: it acts through what real faults act through: processes, links, the user's commands, the user's code, the disk.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from laminar.controller.recent_results import RecentResults
from laminar.controller.relay import store_name
from laminar.controller.repl_answer import CommandError
from laminar.controller.repl_commands import execute
from laminar.observability.events import Notice, RolloutLost, WeightsPublished
from laminar.protocol.messages import Carry, Leaving, WorkerFailed
from laminar.simulation.cluster import SimulatedRun
from laminar.simulation.faults import fault as faults
from laminar.simulation.faults.event_log import EventLog, describe
from laminar.simulation.workers.environment_worker import ModelledEnvironment, ScoreFault
from laminar.simulation.workers.modelled_worker import ModelledWorker
from laminar.simulation.workers.trainer_worker import ModelledTrainer

RETRY_S = 1.0  # of a command, while there is no controller
FAIL_S = 0.1  # from a worker's saying that it fails to its end; what it said may come too late

# What a person can do to a controller only.
OF_THE_CONTROLLER = (faults.Pause, faults.Stop, faults.Add, faults.Remove, faults.Drain, faults.ControllerLost)

REWARD_FAULTS: dict[str, ScoreFault] = {"hang": "hang", "raise": "error", "nan": "nan"}


@dataclass(kw_only=True, slots=True, frozen=True)
class Strike:
    """A fault that hit something."""

    at: float  # virtual seconds
    fault: faults.Fault
    worker: str  # its name, a rank's for the trainer; empty if the fault is none of a worker's


class Injector:
    """Give `attach` as SimulatedRun's `before`."""

    def __init__(self, schedule: tuple[faults.Fault, ...], log: EventLog) -> None:
        self.strikes: list[Strike] = []
        self._schedule = schedule
        self._log = log
        self._waiting: list[faults.Fault] = []  # for their moment
        self._bad_rewards: list[faults.BadReward] = []  # one entry per reward that is still to fail
        self._bad_turns: list[faults.BadTurn] = []
        self._bad_checkpoints = 0
        self._checkpoints: dict[tuple[int, int], str] = {}  # (life of the trainer, step) -> error
        self._run: SimulatedRun
        self._recent: RecentResults
        self._loop: asyncio.AbstractEventLoop

    def attach(self, run: SimulatedRun) -> None:
        """Set a timer for each fault. Called in the loop, before anything has started."""
        self._run, self._loop = run, asyncio.get_running_loop()
        self._recent = RecentResults(run.events)
        run.supervisor.on_started = self._on_started
        run.events.subscribe(self._on_event, WeightsPublished, RolloutLost, Notice)
        for fault in self._schedule:
            self._loop.call_at(fault.at, self._due, fault)

    # ------------------------------------------------------------ when

    def _due(self, fault: faults.Fault) -> None:
        if fault.moment:
            self._waiting.append(fault)
        else:
            self._strike(fault)

    def _on_event(self, event: Any) -> None:
        if isinstance(event, WeightsPublished):
            self._moment("publish")
        elif isinstance(event, RolloutLost) or " was lost" in event.text or "trainer anew" in event.text:
            self._moment("loss")

    def on_message(self, message: object) -> None:
        """A delivery: a broadcast that starts is a moment too."""
        if isinstance(message, Carry):
            self._moment("broadcast")

    def _on_started(self, worker: ModelledWorker) -> None:
        if isinstance(worker, ModelledEnvironment):
            worker.fault = self._score_fault
            worker.turn_fault = self._turn_fault
        elif isinstance(worker, ModelledTrainer):
            number = worker.life.number
            worker.checkpoint_error = lambda step: self._checkpoint_error(number, step)
        if worker.life.number > 1:
            self._moment("restart")

    def _moment(self, moment: str) -> None:
        """Never at once: the controller, or a worker, is in the middle of something."""
        for fault in [waiting for waiting in self._waiting if waiting.moment == moment]:
            self._waiting.remove(fault)
            self._loop.call_later(fault.delay_s, self._strike, fault)

    # ------------------------------------------------------------ what

    def _strike(self, fault: faults.Fault) -> None:
        if self._run.controller_lost.is_set() and isinstance(fault, OF_THE_CONTROLLER):
            self._log.fault(self._loop.time(), f"hits nothing, there is no controller: {describe(fault)}")
            return
        match fault:
            case faults.BadReward():
                self._bad_rewards += [fault] * fault.count
                self._struck(fault)
            case faults.BadTurn():
                self._bad_turns += [fault] * fault.count
                self._struck(fault)
            case faults.FailedCheckpoint():
                self._bad_checkpoints += fault.count
                self._struck(fault)
            case faults.Pause():
                self._run.controller.control.pause(generation=fault.generation, training=fault.training)
                self._struck(fault)
                self._later(fault.seconds, self._resume, fault)
            case faults.Stop():
                self._run.controller.control.stop()
                self._struck(fault)
            case faults.RelayTierLost():
                for worker in self._run.supervisor.lose_tier():
                    self._struck(fault, worker)
            case faults.ControllerLost():
                self._struck(fault)
                self._run.lose_controller()
            case faults.HostLost():
                self._lose_host(fault)
            case faults.Add() | faults.Remove() | faults.Drain():
                self._command(fault)
            case _:
                self._strike_workers(fault)

    def _command(self, fault: faults.Add | faults.Remove | faults.Drain) -> None:
        """As the user types it."""
        name = type(fault).__name__.lower()
        argument = str(fault.count) if isinstance(fault, faults.Add) else fault.worker
        try:
            execute(f"{name} {argument}", self._run.controller, self._recent)
        except CommandError as error:
            self._log.fault(self._loop.time(), f"refused: {describe(fault)}: {error}")
            return
        self.strikes.append(Strike(at=self._loop.time(), fault=fault, worker=faults.worker_of(fault)))
        self._log.fault(self._loop.time(), describe(fault))

    def _resume(self, fault: faults.Pause) -> None:
        """A pause outlives its controller: the person tries again until another is there."""
        if self._run.controller_lost.is_set():
            self._later(RETRY_S, self._resume, fault)
            return
        self._run.controller.control.resume(generation=fault.generation, training=fault.training)
        self._log.fault(self._loop.time(), f"ends: {describe(fault)}")

    def _lose_host(self, fault: faults.HostLost) -> None:
        config = self._run.experiment
        kinds = {"relay": config.relay.count, "rollout": config.relay.count}
        if fault.relay == 0:
            kinds["trainer"] = 1
        for worker in list(self._run.workers.values()):
            if worker.alive and worker.kind in kinds and worker.life.index % kinds[worker.kind] == fault.relay:
                self._struck(fault, worker)
                worker.kill("its host is gone")
        self._run.stores.lose(store_name(fault.relay))

    def _strike_workers(self, fault: faults.Fault) -> None:
        name = faults.worker_of(fault)
        hit = False
        for worker in list(self._run.workers.values()):
            if worker.alive and (worker.name == name or (name == faults.TRAINER and worker.kind == "trainer")):
                hit = True
                self._struck(fault, worker)
                self._strike_worker(fault, worker)
        if not hit:
            self._log.fault(self._loop.time(), f"hits nothing: {describe(fault)}")

    def _strike_worker(self, fault: faults.Fault, worker: ModelledWorker) -> None:
        network, peer = self._run.network, worker.peer
        match fault:
            case faults.Kill():
                worker.kill()
            case faults.Fail():
                worker.send(WorkerFailed(error="the engine has failed", user_error=False))
                self._later(FAIL_S, worker.kill)
            case faults.SpotNotice():
                worker.send(Leaving(seconds=fault.seconds))
                self._later(fault.seconds, worker.kill)
            case faults.Hang():
                worker.hang()
                self._later(fault.seconds, worker.resume)
            case faults.Partition():
                network.partition(peer)
                self._later(fault.seconds, network.heal, peer)
            case faults.SlowLink():
                network.slow(peer, extra_s=fault.extra_s)
                self._later(fault.seconds, network.slow, peer)
            case faults.Duplicates():
                network.duplicate(peer, fault.probability)
                self._later(fault.seconds, network.duplicate, peer, 0.0)

    def _later(self, seconds: float, callback: Any, *arguments: Any) -> None:
        self._loop.call_later(seconds, callback, *arguments)

    def _struck(self, fault: faults.Fault, worker: ModelledWorker | None = None) -> None:
        self.strikes.append(Strike(at=self._loop.time(), fault=fault, worker=worker.name if worker else ""))
        self._log.fault(self._loop.time(), f"{describe(fault)}{f' hits {worker.peer}' if worker else ''}")

    # ------------------------------------------------------------ the user's code, and the disk

    def _score_fault(self, trajectory_id: str) -> ScoreFault | None:
        if not self._bad_rewards:
            return None
        how = self._bad_rewards.pop(0).how
        self._log.fault(self._loop.time(), f"reward of trajectory {trajectory_id}: {how}")
        return REWARD_FAULTS[how]

    def _turn_fault(self, trajectory_id: str) -> ScoreFault | None:
        if not self._bad_turns:
            return None
        how = self._bad_turns.pop(0).how
        self._log.fault(self._loop.time(), f"turn of trajectory {trajectory_id}: {how}")
        return REWARD_FAULTS[how]

    def _checkpoint_error(self, life: int, step: int) -> str:
        """All ranks fail, or none: they write to one disk."""
        key = (life, step)
        if key not in self._checkpoints:
            self._checkpoints[key] = "No space left on device" if self._bad_checkpoints else ""
            self._bad_checkpoints = max(0, self._bad_checkpoints - 1)
        return self._checkpoints[key]

"""The controller of `benchmarks/controller.py`, in a process of its own: the production code on uvloop, CURVE and all.

    python benchmarks/controller_side.py OPTIONS      (one `Options` as JSON; prints one JSON object)

It starts the load (`controller_load.py`), waits until every rollout generates, then measures at one offered rate after
another.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from controller_load import DELTA_INTERVAL_S, PROMPT_TOKENS, TOKENS_PER_DELTA, Share, open_board
from loop_lag import LoopLag

from laminar.config.schema import ExperimentConfig
from laminar.controller.controller import Controller
from laminar.controller.journal.journal import Journal
from laminar.controller.journal.tables import JOURNAL, create_journal
from laminar.controller.journal.writer import ThreadWriter
from laminar.errors import WorkerLost
from laminar.launch import controller_process
from laminar.launch.commands import expected_workers
from laminar.observability.events import EventBus, StepFinished, TokensAppended, TrajectoryFinished, WeightsPublished
from laminar.observability.run_directory import RunDirectory
from laminar.protocol.connection import Connection, CurveKeys
from laminar.protocol.zeromq import ZmqControllerChannel

GROUP_SIZE = 8
START_LIMIT_S = 120.0


@dataclass(kw_only=True, slots=True)
class Options:
    """One run of the controller."""

    folder: str  # that exists, for the run directory
    rollouts: int
    trajectories: int  # in flight per rollout
    mean_tokens: int  # of a response
    processes: int  # that drive the load
    seconds: float  # of each measurement
    settle_s: float  # before each
    rates: list[float]  # tokens/s offered, one measurement each; the first is the pace of real rollouts
    lag_limit_s: float  # stop after the first rate at which the lag is above
    profile: str = ""  # file for a cProfile of the last measurement
    journal: bool = True  # write one, as a run does


@dataclass(kw_only=True, slots=True)
class Level:
    """What was measured at one offered rate."""

    asked_tokens_per_s: float
    offered_tokens_per_s: float  # that the load really sent
    tokens_per_s: float  # taken in by the controller
    messages_per_s: float  # batches of deltas
    cpu_fraction: float  # CPU seconds of the controller's process, ZeroMQ's thread included, per second
    loop_fraction: float  # of those, the event loop's thread
    tokens_per_cpu_s: float
    loop_lag_p50_ms: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    own_lag_p99_ms: float  # less the time for which the loop's thread waited for a CPU that ran something else
    own_lag_max_ms: float
    cpu_wait_fraction: float  # how much it waited so, per second: above a few percent the lag is the machine's
    finished_per_s: float  # trajectories that ended, were scored and buffered
    steps: int
    behind_tokens: int  # sent and not yet taken in, at the end
    held_trajectories: int  # at the end, in progress or waiting to be trained
    tokens_per_trajectory: float  # of those, on average, at the end
    bytes_per_trajectory: float  # of those: growth of the resident memory since before the first prompt


@dataclass(kw_only=True, slots=True)
class Counts:
    """What the event bus told since the start."""

    rollouts: int
    tokens: int = 0
    messages: int = 0
    finished: int = 0
    steps: int = 0
    generating: set[str] = field(default_factory=set)
    first_published: asyncio.Event = field(default_factory=asyncio.Event)
    all_generate: asyncio.Event = field(default_factory=asyncio.Event)

    def subscribe(self, events: EventBus) -> None:
        """Count from now on."""
        events.subscribe(self._on_tokens, TokensAppended)
        events.subscribe(self._on_finished, TrajectoryFinished)
        events.subscribe(self._on_step, StepFinished)
        events.subscribe(lambda _: self.first_published.set(), WeightsPublished)

    def _on_tokens(self, event: TokensAppended) -> None:
        self.tokens += event.tokens + event.late_tokens
        self.messages += 1
        self.generating.add(event.rollout)
        if len(self.generating) == self.rollouts:
            self.all_generate.set()

    def _on_finished(self, _: TrajectoryFinished) -> None:
        self.finished += 1

    def _on_step(self, _: StepFinished) -> None:
        self.steps += 1


class Measured(Exception):
    """Everything has been measured: ends the run at once."""


class Measurement:
    """A controller under load."""

    def __init__(self, options: Options, directory: RunDirectory, config: ExperimentConfig) -> None:
        self._options = options
        self._config = config
        self._run_dir = directory.path
        self._events = EventBus()
        started = time.monotonic()
        directory.record(self._events, lambda: time.monotonic() - started)
        self._counts = Counts(rollouts=options.rollouts)
        self._counts.subscribe(self._events)
        self._lag = LoopLag()
        self._board = open_board(self._run_dir, options.processes)
        self._load: list[subprocess.Popen[bytes]] = []
        self.levels: list[Level] = []
        self._resident_before = 0

    async def run(self) -> None:
        """Start everything, measure, end everything."""
        controller_keys, worker_keys = CurveKeys.create(), CurveKeys.create()
        channel = ZmqControllerChannel(
            "127.0.0.1", 0, controller_keys=controller_keys, worker_public_key=worker_keys.public
        )
        Connection.to_this_process(channel.address, "benchmark", controller=controller_keys, worker=worker_keys).write(
            self._run_dir
        )
        self._controller = Controller(
            self._config,
            channel,
            self._events,
            run_id="benchmark",
            run_dir=self._run_dir,
            expected_workers=expected_workers(self._config),
            restart=_no_restart,
            journal=self._journal(),
        )
        try:
            await self._controller.run(self._launch, (self._lag.watch_forever, self._measure))
        except Measured:
            pass
        finally:
            for process in self._load:  # as in a run: the workers have ended before the channel closes
                process.kill()
                process.wait()
            channel.close()
            self._controller.journal.close()

    def _journal(self) -> Journal | None:
        if not self._options.journal:
            return None
        create_journal(self._run_dir / JOURNAL)
        writer = ThreadWriter(self._run_dir / JOURNAL, on_trouble=_trouble, on_failure=_failed)
        return Journal(
            writer,
            keep_checkpoints=self._config.trainer.keep_checkpoints,
            keep_trained=True,  # until a checkpoint, which never comes: the file holds all that was ever written
            limit_s=START_LIMIT_S,
        )

    def journal_figures(self) -> dict[str, float]:
        """What the journal has taken in since the start."""
        return {
            "bytes": float((self._run_dir / JOURNAL).stat().st_size) if self._options.journal else 0.0,
            "transactions": float(self._controller.journal.transactions),
            "trajectories": float(self._counts.finished),
        }

    async def _launch(self) -> None:
        self._start_load()

    def _start_load(self) -> None:
        others = [name for name in expected_workers(self._config) if not name.startswith("rollout-")]
        for process in range(self._options.processes):
            share = Share(
                run_dir=str(self._run_dir),
                process=process,
                rollouts=list(range(process, self._options.rollouts, self._options.processes)),
                mean_tokens=self._options.mean_tokens,
                others=others if process == 0 else [],
            )
            script = Path(__file__).with_name("controller_load.py")
            self._load.append(subprocess.Popen([sys.executable, str(script), json.dumps(asdict(share))]))

    async def _measure(self) -> None:
        async with asyncio.timeout(START_LIMIT_S):
            await self._counts.first_published.wait()
            self._resident_before = resident_bytes()
            await self._counts.all_generate.wait()
        for number, rate in enumerate(self._options.rates):
            self._board[0] = rate / self._paced_rate()
            await asyncio.sleep(self._options.settle_s)
            last = number == len(self._options.rates) - 1
            self.levels.append(await self._level(rate, self._options.profile if last else ""))
            behind = self.levels[-1].behind_tokens > rate / 2
            if behind or self.levels[-1].own_lag_p99_ms > self._options.lag_limit_s * 1e3:
                break
        raise Measured

    def _paced_rate(self) -> float:
        """Tokens/s of all rollouts together at speed 1."""
        return self._options.rollouts * self._options.trajectories * TOKENS_PER_DELTA / DELTA_INTERVAL_S

    async def _level(self, rate: float, profile: str) -> Level:
        counts = self._counts
        self._lag.clear()
        tokens, messages, finished, steps = counts.tokens, counts.messages, counts.finished, counts.steps
        sent, cpu, thread, began = self._sent(), time.process_time(), time.thread_time(), time.perf_counter()
        waited = self._lag.cpu_wait.seconds()
        if profile:
            await _profiled(profile, self._options.seconds)
        else:
            await asyncio.sleep(self._options.seconds)
        seconds, cpu, thread = time.perf_counter() - began, time.process_time() - cpu, time.thread_time() - thread
        waited = self._lag.cpu_wait.seconds() - waited
        lag, own = np.array(self._lag.late_s) * 1e3, np.array(self._lag.own_s) * 1e3
        return Level(
            asked_tokens_per_s=rate,
            offered_tokens_per_s=(self._sent() - sent) / seconds,
            tokens_per_s=(counts.tokens - tokens) / seconds,
            messages_per_s=(counts.messages - messages) / seconds,
            cpu_fraction=cpu / seconds,
            loop_fraction=thread / seconds,
            tokens_per_cpu_s=(counts.tokens - tokens) / cpu,
            loop_lag_p50_ms=float(np.percentile(lag, 50)),
            loop_lag_p99_ms=float(np.percentile(lag, 99)),
            loop_lag_max_ms=float(lag.max()),
            own_lag_p99_ms=float(np.percentile(own, 99)),
            own_lag_max_ms=float(own.max()),
            cpu_wait_fraction=waited / seconds,
            finished_per_s=(counts.finished - finished) / seconds,
            steps=counts.steps - steps,
            behind_tokens=int(self._sent() - counts.tokens),
            **self._held(),
        )

    def _sent(self) -> float:
        return float(self._board[1:].sum())

    def _held(self) -> dict[str, Any]:
        grown = resident_bytes() - self._resident_before
        held = [trajectory for group in self._controller.buffer for trajectory in group.trajectories]
        return {
            "held_trajectories": len(held),
            "tokens_per_trajectory": sum(trajectory.num_tokens for trajectory in held) / len(held),
            "bytes_per_trajectory": grown / len(held),
        }


async def _profiled(path: str, seconds: float) -> None:
    import cProfile

    profile = cProfile.Profile()
    profile.enable()
    await asyncio.sleep(seconds)
    profile.disable()
    profile.dump_stats(path)


def _trouble(error: str) -> None:
    raise OSError(f"the journal cannot be written: {error}")


def _failed(error: Exception) -> None:
    raise error


async def _no_restart(name: str, reason: str) -> None:
    raise WorkerLost(f"{name} was lost: {reason}")


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def experiment(options: Options) -> ExperimentConfig:
    """As large a run as the options ask for; a step takes a quarter of what is in flight."""
    tree: dict[str, Any] = {
        "name": "controller-benchmark",
        "model": {"path": "none"},
        "data": {"source": {"type": "jsonl", "path": "none.jsonl"}, "max_prompt_tokens": PROMPT_TOKENS},
        "reward": {"function": "exact", "workers": 16},
        "rollout": {
            "replicas": options.rollouts,
            "max_running": options.trajectories,
            "max_response_tokens": 2 * options.mean_tokens,
        },
        "relay": {"count": 2},
        "trainer": {
            "steps": 1_000_000,
            "groups_per_step": max(1, options.rollouts * options.trajectories // GROUP_SIZE // 4),
            "group_size": GROUP_SIZE,
        },
        "schedule": {"max_staleness": 8},
        "controller": {"start_timeout_s": START_LIMIT_S},
    }
    return ExperimentConfig.model_validate(tree)


def main() -> None:
    """One run, as a process."""
    options = Options(**json.loads(sys.argv[1]))
    config = experiment(options)
    controller_process.prepare(len(expected_workers(config)))  # as `laminar train` does
    directory = RunDirectory.create(Path(options.folder) / "run", config, overwrite=False)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measurement = Measurement(options, directory, config)
            runner.run(measurement.run())
    finally:
        directory.close()
    figures = {"levels": [asdict(level) for level in measurement.levels], "journal": measurement.journal_figures()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""The Ray side of `benchmarks/controller.py`: the same batches of deltas as calls of one actor that keeps the same books.

The receiving actor does less than the controller: `PartialResponsePool.take_in` and a new lease after each
end, but no dispatch, events, metrics, rewards, groups, steps, weights or heartbeats.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from controller_load import ModelledRollout

from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.protocol.messages import TrajectoryDeltas
from laminar.trajectory import Prompt, Trajectory

RAY_VERSION = "2.60.0"
OUTSTANDING = 64  # calls of one producer that are not answered yet
PROMPT = Prompt(prompt_id=0, source="", text="", token_ids=np.zeros(1, np.int32), answer="", metadata="")


class Receiver:
    """The actor: trajectories `rollout.member.generation`, all leased once, of version 0."""

    def __init__(self, rollouts: int, trajectories: int) -> None:
        self._pool = PartialResponsePool()
        self._tokens = 0
        for rollout in range(rollouts):
            for member in range(trajectories):
                self._lease(f"{rollout}.{member}.0")

    def take_in(self, message: TrajectoryDeltas) -> None:
        """One batch of deltas."""
        for finished in self._pool.take_in(message, now=0.0):
            self._lease(_successor(finished.trajectory_id))
        self._tokens += len(message.token_ids)

    def progress(self) -> tuple[int, int, float, float]:
        """Tokens taken in, tokens refused, CPU seconds of this process (all threads), wall clock."""
        return self._tokens, self._pool.late_tokens, time.process_time(), time.perf_counter()

    def _lease(self, trajectory_id: str) -> None:
        trajectory = Trajectory(trajectory_id=trajectory_id, group_id=0, prompt=PROMPT)
        self._pool.lease(trajectory, rollout="", policy_version=0, now=0.0)


class Producer:
    """An actor that models a share of the rollouts and calls the receiver."""

    def __init__(self, receiver: Any, rollouts: list[int], trajectories: int, mean_tokens: int) -> None:
        self._receiver = receiver
        self._rollouts = [ModelledRollout(index, mean_tokens, policy_version=0) for index in rollouts]
        for rollout in self._rollouts:
            for member in range(trajectories):
                rollout.start(f"{rollout.index}.{member}.0", 1)

    def push(self, seconds: float) -> None:
        """Calls as fast as the receiver takes them, in the order of each rollout's deltas."""
        import ray  # type: ignore[import-not-found, unused-ignore]

        end = time.monotonic() + seconds
        calls: deque[Any] = deque()
        while time.monotonic() < end:
            for rollout in self._rollouts:
                message = rollout.deltas()
                for trajectory_id, reason in zip(message.trajectory_ids, message.finish_reasons, strict=True):
                    if reason:
                        rollout.start(_successor(trajectory_id), 1)
                calls.append(self._receiver.take_in.remote(message))
                if len(calls) >= OUTSTANDING:
                    ray.get([calls.popleft() for _ in range(OUTSTANDING // 2)])
        ray.get(list(calls))


def _successor(trajectory_id: str) -> str:
    stem, _, generation = trajectory_id.rpartition(".")
    return f"{stem}.{int(generation) + 1}"


def require_ray() -> None:
    """Raises SystemExit if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise SystemExit(
            f"Ray is not installed, and only this comparison needs it: `pip install ray=={RAY_VERSION}`, or --no-ray"
        )


def measure_ray(
    *, rollouts: int, trajectories: int, mean_tokens: int, processes: int, seconds: float
) -> dict[str, float]:
    """Tokens/s that the receiving actor takes in, per second and per CPU second of its process."""
    # Ray's workers import this module and laminar by themselves.
    paths = [str(Path(__file__).parent), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray  # type: ignore[import-not-found, unused-ignore]

    ray.init(
        num_cpus=1 + processes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=100 << 20,
    )
    try:
        receiver = ray.remote(Receiver).options(num_cpus=1).remote(rollouts, trajectories)
        producers = [
            ray.remote(Producer)
            .options(num_cpus=1)
            .remote(receiver, list(range(process, rollouts, processes)), trajectories, mean_tokens)
            for process in range(processes)
        ]
        ray.get([producer.push.remote(1.0) for producer in producers])  # warm-up
        tokens, _, cpu, began = ray.get(receiver.progress.remote())
        ray.get([producer.push.remote(seconds) for producer in producers])
        tokens_after, refused, cpu_after, ended = ray.get(receiver.progress.remote())
    finally:
        ray.shutdown()
    if refused:
        raise RuntimeError(f"the actor refused {refused} tokens: the load and its books do not fit")
    taken = tokens_after - tokens
    return {
        "tokens_per_s": taken / (ended - began),
        "tokens_per_cpu_s": taken / (cpu_after - cpu),
        "cpu_fraction": (cpu_after - cpu) / (ended - began),
    }

"""The other side of `benchmarks/controller.py`: every worker of a run, modelled, on real authenticated sockets.

One process drives many workers, each on a DEALER connection of its own, in a plain loop without an event loop: it must
cost less than the controller that it loads. Rollouts gain `TOKENS_PER_DELTA` tokens per trajectory and message; all other
workers answer at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

import laminar
from laminar.protocol import messages
from laminar.protocol.codec import Codec
from laminar.protocol.connection import CONNECTION_FILE, Connection

TOKENS_PER_DELTA = 16
DELTA_INTERVAL_S = 0.5  # at speed 1: 32 tokens a second and trajectory
PROMPT_TOKENS = 128
HEARTBEAT_S = 1.0
BOARD_FILE = "board.npy"  # float64: speed of all rollouts, then per process the tokens sent so far

_RANDOM = np.random.default_rng(0)
_TOKENS = _RANDOM.integers(0, 150_000, 1 << 20).astype(np.int32)
_LOGPROBS = -_RANDOM.random(1 << 20, dtype=np.float32)


@dataclass(kw_only=True, slots=True)
class Share:
    """What one process models."""

    run_dir: str
    process: int
    rollouts: list[int]
    mean_tokens: int  # of a response
    others: list[str]  # names of the workers that are no rollouts


@dataclass(slots=True)
class Work:
    """One trajectory on a modelled rollout."""

    lease: int
    length: int
    tokens: int = 0


@dataclass(slots=True)
class ModelledRollout:
    """Holds trajectories and says what they gained since the last message."""

    index: int
    mean_tokens: int
    policy_version: int = -1
    in_flight: dict[str, Work] = field(default_factory=dict)
    started: int = 0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.index)

    def start(self, trajectory_id: str, lease: int) -> None:
        """Take a trajectory. Lengths are even from half to one and a half the mean; the first ones are cut short at
        random, as if the rollout had been at it for long.
        """
        share = self.rng.random() if self.started < 32 else 0.5 + self.rng.random()
        deltas = max(1, round(self.mean_tokens * share / TOKENS_PER_DELTA))
        self.in_flight[trajectory_id] = Work(lease, deltas * TOKENS_PER_DELTA)
        self.started += 1

    def deltas(self) -> messages.TrajectoryDeltas:
        """The next message; trajectories at their end leave with it."""
        ids, leases, starts, reasons = [], [], [], []
        for trajectory_id, work in self.in_flight.items():
            ids.append(trajectory_id)
            leases.append(work.lease)
            starts.append(work.tokens)
            work.tokens += TOKENS_PER_DELTA
            reasons.append("stop" if work.tokens >= work.length else None)
        count = len(ids)
        begin = int(self.rng.integers(len(_TOKENS) - count * TOKENS_PER_DELTA))
        span = slice(begin, begin + count * TOKENS_PER_DELTA)
        for trajectory_id, reason in zip(ids, reasons, strict=True):
            if reason:
                del self.in_flight[trajectory_id]
        return messages.TrajectoryDeltas(
            policy_version=self.policy_version,
            trajectory_ids=tuple(ids),
            leases=tuple(leases),
            starts=np.array(starts, np.int32),
            token_counts=np.full(count, TOKENS_PER_DELTA, np.int32),
            token_ids=_TOKENS[span],
            logprobs=_LOGPROBS[span],
            finish_reasons=tuple(reasons),
            load=messages.RolloutLoad(running=count, waiting=0, kv_utilization=0.5),
        )

    def answer(self, message: Any) -> Iterator[object]:
        """What it says at once to a message of the controller."""
        if isinstance(message, messages.PullWeights):
            self.policy_version = message.policy_version
            yield messages.WeightsPulled(policy_version=message.policy_version, seconds=0.0, nbytes=4)
        elif isinstance(message, messages.Generate):
            for assignment in message.assignments:
                self.start(assignment.trajectory_id, assignment.lease)


class Line:
    """One worker's connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], connection: Connection, name: str) -> None:
        self.name = name
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, f"{name}@benchmark:{os.getpid()}".encode())
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.curve_serverkey = connection.controller_public_key.encode()
        self.socket.curve_publickey = connection.worker_public_key.encode()
        self.socket.curve_secretkey = connection.worker_secret_key.encode()
        self.socket.connect(connection.address)
        self._codec = Codec()
        kind, _, index = name.rpartition("-")
        self._kind = kind
        self.send(
            messages.Hello(kind=kind, index=int(index), pid=os.getpid(), host="benchmark", version=laminar.__version__)  # type: ignore[arg-type]
        )

    def send(self, message: object) -> None:
        """Queue a message for the controller."""
        self.socket.send_multipart(self._codec.encode(message), copy=True)

    def received(self) -> Iterator[Any]:
        """What has come by now; raises SystemExit when the controller ends the run."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            if frames == [b""]:  # the controller's channel has looked whether this peer is connected
                continue
            message = self._codec.decode(frames)
            if isinstance(message, messages.Shutdown):
                raise SystemExit(0)
            if isinstance(message, messages.Welcome):
                if self._kind == "relay":
                    joined = messages.RelayJoined(versions=(), address="", world="", world_rank=-1, library="")
                    self.send(joined)
                self.send(messages.Ready(detail="modelled"))
            else:
                yield message


def answer(message: Any) -> Iterator[object]:
    """What relays, trainer ranks and environment workers say to a message."""
    if isinstance(message, messages.Carry):
        yield messages.WeightsStored(
            policy_version=message.policy_version,
            seconds=0.0,
            nbytes=4,
            received_bytes=4,
            chunks=1,
            damaged=0,
            latency_s=0.0,
            bytes_per_s=0.0,
        )
    elif isinstance(message, messages.PublishWeights):
        yield messages.WeightsPublished(policy_version=message.policy_version, publish_stall_s=0.0, nbytes=4)
    elif isinstance(message, messages.TrainStep):
        yield messages.StepTrained(step=message.step, part=message.part, seconds=0.0, metrics={"loss": 0.0})
        if message.publish_version is not None:
            yield messages.WeightsPublished(policy_version=message.publish_version, publish_stall_s=0.0, nbytes=4)
    elif isinstance(message, messages.SaveCheckpoint):
        yield messages.CheckpointSaved(step=message.step, path=message.path, seconds=0.0, nbytes=4, error="")
    elif isinstance(message, messages.FetchPrompts):
        yield messages.PromptsFetched(
            start=message.start,
            prompts=tuple(_prompt(message.start + offset) for offset in range(message.count)),
            exhausted=False,
        )
    elif isinstance(message, messages.ScoreTrajectory):
        reward = float(int(message.trajectory_id.rpartition(".")[2]) % 2)
        yield messages.TrajectoryScored(trajectory_id=message.trajectory_id, reward=reward, response_text="", error="")


def _prompt(prompt_id: int) -> messages.PromptRecord:
    return messages.PromptRecord(
        prompt_id=prompt_id,
        source="benchmark",
        text="?",
        token_ids=_TOKENS[prompt_id % 1000 : prompt_id % 1000 + PROMPT_TOKENS],
        answer="",
        metadata="{}",
    )


def open_board(run_dir: Path, processes: int = 0) -> NDArray[np.float64]:
    """The numbers that the processes share, in a file; made anew if `processes` is given."""
    path = run_dir / BOARD_FILE
    if processes:
        np.save(path, np.array([1.0] + [0.0] * processes))
    board: NDArray[np.float64] = np.load(path, mmap_mode="r+")
    return board


class Load:
    """The loop of one process."""

    def __init__(self, share: Share) -> None:
        run_dir = Path(share.run_dir)
        connection = Connection.read(run_dir / CONNECTION_FILE)
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, len(share.rollouts) + len(share.others) + 16)
        self._board = open_board(run_dir)
        self._process = share.process
        self._others = [Line(context, connection, name) for name in share.others]
        self._rollouts = [
            (Line(context, connection, f"rollout-{index}"), ModelledRollout(index, share.mean_tokens))
            for index in share.rollouts
        ]
        self._poller = zmq.Poller()
        for line in self._others:
            self._poller.register(line.socket, zmq.POLLIN)

    def run(self) -> None:
        """Until the controller ends the run, or is gone."""
        os.nice(5)  # stands for other machines: the controller should have a core for itself
        parent = os.getppid()
        position, due, beat, look = 0, time.monotonic(), time.monotonic(), time.monotonic()
        while os.getppid() == parent:
            now = time.monotonic()
            gap = DELTA_INTERVAL_S / max(float(self._board[0]), 1e-3) / max(1, len(self._rollouts))
            due = max(due, now - DELTA_INTERVAL_S)  # what it cannot keep up with is not offered
            while due <= now and self._rollouts:
                self._serve(*self._rollouts[position])
                position, due = (position + 1) % len(self._rollouts), due + gap
            if now >= look:  # those without trajectories wait for weights or work
                look = now + 0.02
                for line, rollout in self._rollouts:
                    if not rollout.in_flight:
                        self._hear(line, rollout)
            if now >= beat:
                beat = now + HEARTBEAT_S
                for line in [*self._others, *(line for line, _ in self._rollouts)]:
                    line.send(messages.Heartbeat())
            wait_s = min(due if self._rollouts else look, look, beat) - time.monotonic()
            if wait_s > 0:
                self._poller.poll(max(1, int(wait_s * 1e3)))
            for line in self._others:
                for message in line.received():
                    for reply in answer(message):
                        line.send(reply)

    def _hear(self, line: Line, rollout: ModelledRollout) -> None:
        for message in line.received():
            for reply in rollout.answer(message):
                line.send(reply)

    def _serve(self, line: Line, rollout: ModelledRollout) -> None:
        self._hear(line, rollout)
        if rollout.in_flight:
            message = rollout.deltas()
            line.send(message)
            self._board[1 + self._process] += len(message.token_ids)


if __name__ == "__main__":
    Load(Share(**json.loads(sys.argv[1]))).run()

"""A modelled environment worker: prompts of a workload's lengths, answers to turns, and rewards after a latency.

Invariant: prompts, rewards and latencies depend on the seed and on what is asked for, not on who answers or when.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from laminar.protocol import messages
from laminar.simulation.channels.network import SimulatedNetwork
from laminar.simulation.models.turns import NOTHING, OBSERVATION
from laminar.simulation.models.workload import Workload
from laminar.simulation.workers.modelled_worker import Life, ModelledWorker

ScoreFault = Literal["hang", "nan", "error"]
SCALE = 1 << 32


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardModel:
    """Latency of scoring and share of right answers."""

    latency_s: float = 0.005  # the least that a call takes
    tail_s: float = 0.0  # mean of the exponential distribution on top
    accuracy: float = 0.5  # share of trajectories with reward 1; the others have 0
    fetch_s: float = 0.01  # a fetch of prompts


class ModelledEnvironment(ModelledWorker):
    """Answers each call after its own latency, however many are under way."""

    kind = "environment"

    def __init__(
        self,
        network: SimulatedNetwork,
        life: Life,
        *,
        workload: Workload,
        rewards: RewardModel,
        seed: int,
        prompts: int | None = None,
    ) -> None:
        """
        Args:
            workload: gives the prompts' lengths. The token ids of a prompt are all its prompt_id.
            prompts: after so many the data ends; None: never.
        """
        self.fault: Callable[[str], ScoreFault | None] | None = None  # asked before each score, by trajectory id
        self.turn_fault: Callable[[str], ScoreFault | None] | None = None  # before each turn
        self._workload = workload
        self._rewards = rewards
        self._seed = seed
        self._prompts = prompts
        super().__init__(network, life)

    def handle(self, message: Any) -> None:
        """See `ModelledWorker`."""
        if isinstance(message, messages.ScoreTrajectory):
            self._score(message)
        elif isinstance(message, messages.StepEnvironment):
            self._step(message)
        elif isinstance(message, messages.FetchPrompts):
            self.after(self._rewards.fetch_s, self._fetch, message)
        else:
            super().handle(message)

    def _fetch(self, message: messages.FetchPrompts) -> None:
        end = message.start + message.count
        total = None if message.evaluation else self._prompts
        if total is not None:
            end = min(end, total)
        self.send(
            messages.PromptsFetched(
                start=message.start,
                prompts=tuple(self._prompt(prompt_id) for prompt_id in range(message.start, end)),
                exhausted=total is not None and end >= total,
                evaluation=message.evaluation,
            )
        )

    def _prompt(self, prompt_id: int) -> messages.PromptRecord:
        length = self._workload.prompt_tokens(prompt_id)
        return messages.PromptRecord(
            prompt_id=prompt_id,
            source="modelled",
            text=str(prompt_id),
            token_ids=np.full(length, prompt_id, np.int32),
            answer="",
            metadata="{}",
        )

    def _step(self, message: messages.StepEnvironment) -> None:
        trajectory_id, turn = message.trajectory_id, len(message.turn_starts)
        fault = self.turn_fault(trajectory_id) if self.turn_fault is not None else None
        if fault == "hang":
            return
        calls = self._workload.pauses(int(message.prompt_text), int(trajectory_id.rpartition(".")[2]))
        done = turn > len(calls)
        answer = messages.EnvironmentStepped(
            trajectory_id=trajectory_id,
            lease=message.lease,
            token_ids=NOTHING if done else OBSERVATION,
            reward=math.nan if fault == "nan" else 0.0,
            done=done,
            error=f"the tool failed on trajectory {trajectory_id}" if fault == "error" else "",
        )
        self.after(self._rewards.latency_s if done else calls[turn - 1][1], self.send, answer)

    def _score(self, message: messages.ScoreTrajectory) -> None:
        rewards, trajectory_id = self._rewards, message.trajectory_id
        fault = self.fault(trajectory_id) if self.fault is not None else None
        if fault == "hang":
            return
        draw = _mixed(zlib.crc32(f"{self._seed}/{trajectory_id}".encode()))
        seconds = rewards.latency_s
        if rewards.tail_s:
            seconds -= rewards.tail_s * math.log((_mixed(draw + 1) + 1) / SCALE)
        reward, error = float(draw < rewards.accuracy * SCALE), ""
        if fault == "nan":
            reward = math.nan
        elif fault == "error":
            reward, error = math.nan, f"the reward function failed on trajectory {trajectory_id}"
        answer = messages.TrajectoryScored(trajectory_id=trajectory_id, reward=reward, response_text="", error=error)
        self.after(seconds, self.send, answer)


def _mixed(number: int) -> int:
    """A number below SCALE that looks random (the finalizer of MurmurHash3): checksums of like texts are like numbers."""
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16

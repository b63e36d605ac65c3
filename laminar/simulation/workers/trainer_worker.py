"""A modelled trainer rank: one order after another, each for the seconds that the model of the trainer gives.

Invariant: a rank answers an order only if all ranks lived until it was done: the others wait in a collective for a lost one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.controller.relay import MASTER, store_name
from laminar.protocol import messages
from laminar.simulation.channels.network import SimulatedNetwork
from laminar.simulation.models.trainer_model import TrainerModel
from laminar.simulation.workers.carrier import ModelledCarrier
from laminar.simulation.workers.modelled_worker import Life, ModelledWorker
from laminar.simulation.workers.weight_stores import WeightStores, WeightTimes

METRICS = {"loss": 0.0, "mismatch_kl": 0.0}


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerTimes:
    """Seconds of a trainer's work."""

    model: TrainerModel
    nbytes: int  # of a version
    recomputes_logprobs: bool  # once for every trajectory: the policy moves within a step (mini_batches > 1)
    publish_s: float  # for which training stands still at a publish
    switch_s: float = 0.0  # per step, where rollouts and trainer take turns on the same GPUs

    def step_s(self, lengths: NDArray[np.int64], mini_batches: int) -> float:
        """Optimizer updates on trajectories of these lengths (prompt and response, int64 [N])."""
        seconds = sum(
            self.model.gradient_seconds(part) + self.model.optimizer_seconds()
            for part in np.array_split(lengths, mini_batches)
        )
        if self.recomputes_logprobs:
            seconds += self.model.logprob_seconds(lengths)
        return seconds + self.switch_s


class ModelledTrainer(ModelledWorker):
    """One rank."""

    kind = "trainer"

    def __init__(
        self,
        network: SimulatedNetwork,
        life: Life,
        *,
        times: TrainerTimes,
        stores: WeightStores,
        ranks: Sequence[ModelledTrainer],
        weight_times: WeightTimes,
        carriers: MutableMapping[str, ModelledCarrier],
        keep_versions: int,
    ) -> None:
        """
        Args:
            ranks: all that were started together, this one included; the caller fills it.
            carriers: the newest of each worker, by name; that of rank 0 enters itself.
        """
        self.checkpoint_error: Callable[[int], str] = lambda step: ""  # asked for each step; not empty: it fails so
        self.trained: list[tuple[int, int]] = []  # (step, part), in order
        self._times = times
        self._stores = stores
        self._ranks = ranks
        self._keep = keep_versions
        self._orders: deque[Any] = deque()
        self._newest_order = 0
        self._answers: list[object] = []  # to it, as far as they have been given
        self._busy = False
        super().__init__(network, life)
        self._carrier: ModelledCarrier | None = None
        if life.index == 0:
            self._carrier = ModelledCarrier(
                self,
                store=store_name(MASTER),
                times=weight_times,
                stores=stores,
                carriers=carriers,
                keep_versions=keep_versions,
            )

    def handle(self, message: Any) -> None:
        """See `ModelledWorker`."""
        if isinstance(message, messages.Carry) and self._carrier is not None:
            self._carrier.obey(message)  # a thread of its own: not in line with the orders
            return
        if isinstance(message, messages.BroadcastEnded):  # memory that is zeroed in time costs no time here
            return
        if message.order <= self._newest_order:
            if message.order == self._newest_order:  # given again, by a controller that took another's place
                for answer in self._answers:
                    self.send(answer)
            return
        self._newest_order, self._answers = message.order, []
        self._orders.append(message)
        if not self._busy:
            self._next()

    def before_ready_again(self) -> None:
        """See `ModelledWorker`."""
        self.send(messages.TrainerJoined(order=self._newest_order))

    def freeze(self) -> None:
        """See `ModelledWorker`."""
        if self._carrier is not None:
            self._carrier.freeze()

    def thaw(self) -> None:
        """See `ModelledWorker`."""
        if self._carrier is not None:
            self._carrier.thaw()

    def ended(self) -> None:
        """See `ModelledWorker`."""
        if self._carrier is not None:
            self._carrier.ended()

    def _next(self) -> None:
        self._busy = bool(self._orders)
        if not self._busy:
            return
        message = self._orders.popleft()
        if isinstance(message, messages.TrainStep):
            lengths = message.prompt_lengths.astype(np.int64) + message.response_lengths
            seconds = self._times.step_s(lengths, message.mini_batches)
            self._work(seconds, self._step_done, message, seconds)
        elif isinstance(message, messages.PublishWeights):
            self._publish(message.policy_version)
        elif isinstance(message, messages.SaveCheckpoint):
            seconds = self._times.model.checkpoint_seconds()
            self._work(seconds, self._saved, message, seconds)
        elif isinstance(message, messages.LoadCheckpoint):
            seconds = self._times.model.checkpoint_seconds()
            answer = messages.CheckpointLoaded(step=message.step, seconds=seconds)
            self._work(seconds, self._answer, answer)
        else:
            super().handle(message)

    def _work(self, seconds: float, done: Callable[..., None], *arguments: Any) -> None:
        """Call `done` after so much work, unless a rank is lost before."""
        self.after(seconds, self._worked, done, arguments)

    def _worked(self, done: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if all(rank.alive for rank in self._ranks):
            done(*arguments)

    def _answer(self, answer: object) -> None:
        self._say(answer)
        self._next()

    def _say(self, answer: object) -> None:
        self._answers.append(answer)
        self.send(answer)

    def _step_done(self, message: messages.TrainStep, seconds: float) -> None:
        self.trained.append((message.step, message.part))
        self._say(messages.StepTrained(step=message.step, part=message.part, seconds=seconds, metrics=dict(METRICS)))
        if message.publish_version is None:
            self._next()
        else:
            self._publish(message.publish_version)

    def _publish(self, version: int) -> None:
        seconds = self._times.publish_s
        self._work(seconds, self._published, version, seconds)

    def _published(self, version: int, seconds: float) -> None:
        if self.life.index == 0:
            self._stores.put(store_name(MASTER), version, self._keep)
            nbytes = self._times.nbytes
            self._say(messages.WeightsPublished(policy_version=version, publish_stall_s=seconds, nbytes=nbytes))
        self._next()

    def _saved(self, message: messages.SaveCheckpoint, seconds: float) -> None:
        error = self.checkpoint_error(message.step)
        nbytes = 0 if error else self._times.nbytes
        self._answer(
            messages.CheckpointSaved(step=message.step, path=message.path, seconds=seconds, nbytes=nbytes, error=error)
        )

"""What is behind the messages of a simulated run: hardware, language model, data, and how weights travel.

Invariant: the schedules differ only in what the controller does, and in how the weights get to the rollouts (`weight_sync`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from laminar.config.schema import ExperimentConfig
from laminar.simulation.models.hardware import CONSTANTS, Constants, GpuSpec
from laminar.simulation.models.language_models import ModelSpec
from laminar.simulation.models.relay_model import global_sync_seconds, pull_seconds, relay_chain
from laminar.simulation.models.trainer_model import TRAINING_BYTES_PER_PARAMETER, TrainerModel
from laminar.simulation.models.workload import Workload
from laminar.simulation.workers.environment_worker import RewardModel
from laminar.simulation.workers.trainer_worker import TrainerTimes
from laminar.simulation.workers.weight_stores import WeightTimes


@dataclass(kw_only=True, slots=True, frozen=True)
class ClusterModels:
    """One cluster and its data.

    With `weight_sync: global` the weights go straight from the trainer's GPUs to all rollouts' GPUs, as the systems without
    relays do it: the trainer stands still for the whole of it, then every rollout has them. Two cases, never to the
    disadvantage of these systems:
    - all rollouts have drained (`synchronous`, `one_step`, `stream`): they wait for the weights anyway while the trainer
      publishes, so their pull costs nothing. Where the trainer is done before the rollouts have drained, its transfer overlaps
      with their last tokens, which no real system manages.
    - rollouts are interrupted (`partial`): they go on generating while the trainer publishes, so each stands still for as long
      as the transfer takes when it pulls.
    Where rollouts and trainer take turns on the same GPUs (`gpus` are fewer than both need), every step also moves the
    training state out to host memory and back; setting the KV cache up again is left out.
    """

    model: ModelSpec
    gpu: GpuSpec
    gpus: int  # of the cluster
    tensor_parallel: int  # GPUs per rollout
    trainer_gpus: int
    workload: Workload
    weight_sync: Literal["relays", "global"] = "relays"
    rewards: RewardModel = field(default_factory=RewardModel)
    constants: Constants = CONSTANTS
    kv_capacity_tokens: int | None = None  # None: what the GPUs' memory leaves

    def weight_times(self, experiment: ExperimentConfig) -> WeightTimes:
        """Of broadcasts and pulls."""
        if self.weight_sync == "relays":
            chain = relay_chain(self.model, experiment.relay.count, self.constants)
            return WeightTimes(
                nbytes=chain.nbytes,
                latency_s=chain.latency_s,
                bandwidth=chain.bandwidth,
                pull_s=pull_seconds(self.model, self.gpu, self.tensor_parallel, self.constants),
            )
        interrupts = experiment.schedule.name in ("partial", "laminar")
        return WeightTimes(
            nbytes=self.model.weight_bytes,
            latency_s=0.0,
            bandwidth=math.inf,
            pull_s=self._global_sync_s() if interrupts else 0.0,
        )

    def trainer_times(self, experiment: ExperimentConfig) -> TrainerTimes:
        """Of the trainer.

        Raises:
            UserError: the model cannot be trained on its GPUs.
        """
        model = TrainerModel(self.model, self.gpu, self.trainer_gpus, self.constants)
        publish_s = model.publish_stall_seconds() if self.weight_sync == "relays" else self._global_sync_s()
        return TrainerTimes(
            model=model,
            nbytes=self.model.weight_bytes,
            recomputes_logprobs=experiment.trainer.mini_batches > 1,
            publish_s=publish_s,
            switch_s=self._switch_s() if self.takes_turns(experiment) else 0.0,
        )

    def takes_turns(self, experiment: ExperimentConfig) -> bool:
        """Rollouts and trainer share GPUs."""
        return self.trainer_gpus + self.tensor_parallel * experiment.rollout.replicas > self.gpus

    def _global_sync_s(self) -> float:
        return global_sync_seconds(self.model, self.gpu, self.trainer_gpus, self.constants)

    def _switch_s(self) -> float:
        """Training state to host memory and back, every GPU its shard over its own link."""
        state = TRAINING_BYTES_PER_PARAMETER * self.model.parameters / self.trainer_gpus
        return 2 * state / (self.gpu.host_link_bandwidth * self.constants.host_link_share)

"""Seconds that the trainer takes: for a mini-batch, a step, a publish, a checkpoint.

Invariant: the same constants as everywhere (`hardware.py`). Work is spread evenly over the GPUs: sequences are packed to a token
budget, so neither padding nor imbalance between ranks is charged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from laminar.errors import UserError
from laminar.simulation.models.hardware import CONSTANTS, Constants, GpuSpec
from laminar.simulation.models.language_models import ModelSpec

# bf16 weights, fp32 gradients, fp32 master weights and the two moments of AdamW.
TRAINING_BYTES_PER_PARAMETER = 2 + 4 + 4 + 8
# What a checkpoint keeps of that: master weights and moments, and the bf16 export.
CHECKPOINT_BYTES_PER_PARAMETER = 4 + 8 + 2
# What an optimizer step moves through memory: reads gradient, master weight, moments; writes master weight, moments, bf16.
OPTIMIZER_BYTES_PER_PARAMETER = 4 + 4 + 8 + 4 + 8 + 2


class TrainerModel:
    """A trainer that shards the model over all its GPUs (FSDP)."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, gpus: int, constants: Constants = CONSTANTS) -> None:
        """Check that the model can be trained on these GPUs.

        Raises:
            UserError: weights, gradients and optimizer state do not fit.
        """
        state = TRAINING_BYTES_PER_PARAMETER * model.parameters
        room = constants.training_memory_share * gpu.memory_bytes
        if gpus < 1 or state > gpus * room:
            raise UserError(
                f"trainer gpus: {gpus} x {gpu.name} have {gpus * room / 1e9:.0f} GB for weights, gradients and optimizer state "
                f"of {model.name}; expected {state / 1e9:.0f} GB, {int(-(-state // room))} GPUs or more"
            )
        self._model = model
        self._gpu = gpu
        self._gpus = gpus
        self._constants = constants
        self._hosts = -(-gpus // constants.gpus_per_host)

    def gradient_seconds(self, lengths: NDArray[np.int64]) -> float:
        """Forward, recomputation and backward over sequences of prompt and response tokens, int64 [N]."""
        flops = self._model.training_flops(*_sums(lengths), recompute=True)
        return flops / (self._gpus * self._gpu.peak_flops * self._constants.training_flops_share)

    def logprob_seconds(self, lengths: NDArray[np.int64]) -> float:
        """The forward pass that recomputes the old policy's logprobs of sequences, int64 [N]."""
        flops = self._model.forward_flops(*_sums(lengths))
        return flops / (self._gpus * self._gpu.peak_flops * self._constants.training_flops_share)

    def optimizer_seconds(self) -> float:
        """One optimizer update: bound by memory, each GPU on its shard."""
        bandwidth = self._gpus * self._gpu.memory_bandwidth * self._constants.decode_bandwidth_share
        return OPTIMIZER_BYTES_PER_PARAMETER * self._model.parameters / bandwidth

    def step_seconds(self, mini_batches: Sequence[NDArray[np.int64]]) -> float:
        """One step of an update per mini-batch; with several, logprobs are recomputed first, for the policy moves between them.

        Args:
            mini_batches: lengths of the sequences of each, int64 [N].
        """
        seconds = sum(self.gradient_seconds(lengths) + self.optimizer_seconds() for lengths in mini_batches)
        if len(mini_batches) > 1:
            seconds += sum(self.logprob_seconds(lengths) for lengths in mini_batches)
        return seconds

    def publish_stall_seconds(self) -> float:
        """Training stands still while the weights are gathered onto one host and copied into its relay's memory.

        Both go tensor by tensor and overlap, so the slower one counts.
        """
        constants, nbytes = self._constants, self._model.weight_bytes
        network = constants.nics_per_host * constants.nic_bandwidth * constants.network_share
        gather = nbytes * (self._hosts - 1) / self._hosts / network
        return max(gather, nbytes / constants.host_copy_bandwidth)

    def checkpoint_seconds(self) -> float:
        """Every host writes its share."""
        nbytes = CHECKPOINT_BYTES_PER_PARAMETER * self._model.parameters
        return nbytes / (self._hosts * self._constants.storage_bandwidth)


def _sums(lengths: NDArray[np.int64]) -> tuple[float, float]:
    values = lengths.astype(np.float64)
    return float(values.sum()), float(np.dot(values, values))

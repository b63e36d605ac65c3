"""The trainer ranks as one of them sees the others.

Invariant: every rank makes the same collective calls in the same order.

Without a process group (one rank, not started by torchrun) each collective is the identity.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError

MESSAGE_BYTES = 4096  # longest error text that ranks tell each other


class Ranks:
    """Launch, device and collectives of the trainer's ranks, by accelerate: gloo on CPU, nccl on CUDA."""

    def __init__(self, config: ExperimentConfig) -> None:
        """Wait for all ranks and join them; torchrun's environment says who they are.

        Raises:
            UserError: torchrun started another number of ranks than `trainer.ranks`.
        """
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != config.trainer.ranks:
            raise UserError(
                f"trainer.ranks: {config.trainer.ranks} in the config, but torchrun started {started}; "
                "start as many as the config says (--nproc-per-node, --nnodes)"
            )
        self.accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="bf16" if config.model.dtype == "bfloat16" else "no",
            kwargs_handlers=[
                # A rank may wait for another as long as a step may take.
                InitProcessGroupKwargs(timeout=timedelta(seconds=config.controller.step_timeout_s)),
                DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            ],
        )
        # Last: accelerate sets a number of its own choice. It counts for the calling thread.
        torch.set_num_threads(config.trainer.threads)
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes
        self.device: torch.device = self.accelerator.device

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over ranks of a tensor of any shape."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over ranks of a tensor of any shape."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def first_error(self, error: str) -> str:
        """The error of the lowest rank that has one, "" if none has. All ranks get the same answer."""
        if self.size == 1:
            return error
        text = error.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine)
        errors = (bytes(other.cpu().numpy()).rstrip(b"\0").decode(errors="replace") for other in gathered)
        return next((other for other in errors if other), "")

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order; small ones, for they are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reduced(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size == 1:
            return tensor
        result = tensor.to(self.device, copy=True)
        dist.all_reduce(result, operation)
        return result

"""What vLLM calls of ours, most of it in processes of its own, which import this module by name.

Invariants: none of vLLM's processes outlives the process that spawned it, however that one ends; and a weight load that
leaves a parameter of the model untouched is an error, never a silent mix of two versions.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import StatLoggerBase

from laminar.weights.tensors import read_tensors
from laminar.workers.rollout.move_costs import MoveCosts
from laminar.workers.rollout.step_times import StepTimes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from laminar.workers.rollout.vllm_kv_connector import KvMoveConnector

# It warns at every load of the tied head and the rotary tables, which have no weights; `load_policy` checks for itself.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that spawned it ends; at once if that has happened already.

    Does nothing in a process that multiprocessing did not spawn.

    Raises:
        OSError: the kernel refused.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)


class InProcessExecutor(UniProcExecutor):
    """vLLM's executor for one shard: the model runs in the engine process, which this ties to the rollout worker."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


class ShardedExecutor(MultiprocExecutor):
    """vLLM's executor for several shards, a process each; `WorkerExtension` ties these to it."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`); called by `collective_rpc`, in every shard."""

    # What vLLM's worker brings.
    vllm_config: VllmConfig
    model_runner: Any

    def leave_nothing_behind(self) -> None:
        """Called when the engine is up: tie this shard's process to its parent, and unlink what the shards share.

        vLLM's CPU build never unlinks the shards' message buffers. They are mapped by now and work on without names.
        """
        die_with_parent()
        identity = os.environ.get("VLLM_DIST_IDENT")
        if identity:
            for buffer in Path("/dev/shm").glob(f"{identity}-*-cpushm_*"):
                buffer.unlink(missing_ok=True)  # another shard may have been faster

    def load_policy(self, path: str) -> int:
        """Load a committed version file into the model, in place.

        Of a matrix that lies in shards, vLLM's slice for this rank is contiguous memory of the file.

        Args:
            path: the file; tensors by their Hugging Face names, tied ones once.

        Returns:
            bytes of the tensors in the file (a shard reads its part of them).

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a weight file, or parameters of the model are not in it. The engine must not be used after.
        """
        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        read = 0

        def counted() -> Any:
            nonlocal read
            for name, tensor in read_tensors(path):
                read += tensor.nbytes
                yield name, tensor

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            loaded = model.load_weights(counted())
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _repack_tied_head(model)
        missing = sorted(expected - set(loaded))
        if missing:
            raise ValueError(f"{path} left {len(missing)} parameters of the model untouched, first {missing[0]!r}")
        return read

    def kv_layout(self) -> str:
        """How this shard's exported KV is laid out."""
        return _connector().layout()

    def want_kv_export(self, request_id: str, path: str) -> None:
        """See `KvMoveConnector`."""
        _connector().want_export(request_id, path)

    def take_kv_export(self, request_id: str, last: bool) -> tuple[int, int, float, str] | None:
        """(tokens, bytes, seconds, error) of an export by this shard; None: not yet."""
        moved = _connector().take_export(request_id, last=last)
        return None if moved is None else (moved.tokens, moved.nbytes, moved.seconds, moved.error)

    def take_kv_import(self, request_id: str) -> tuple[int, int, float, str] | None:
        """(tokens, bytes, seconds, error) of an import by this shard; None: there was none."""
        moved = _connector().take_import(request_id)
        return None if moved is None else (moved.tokens, moved.nbytes, moved.seconds, moved.error)


def _connector() -> KvMoveConnector:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from laminar.workers.rollout.vllm_kv_connector import KvMoveConnector

    connector = get_kv_transfer_group()
    assert isinstance(connector, KvMoveConnector)
    return connector


class LoadLogger(StatLoggerBase):
    """Keeps the load figures that vLLM reports after about every step, and not at all while idle; in the client."""

    def __init__(self, costs: MoveCosts, step_times: StepTimes) -> None:
        """Start at zero; prefills are added to `costs`, the time of each decode step to `step_times`."""
        self.running = 0
        self.kv_utilization = 0.0
        self._costs = costs
        self._step_times = step_times

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM."""
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.kv_utilization = scheduler_stats.kv_cache_usage
        if iteration_stats is None:
            return
        for finished in iteration_stats.finished_requests:
            prefilled = finished.num_prompt_tokens - finished.num_cached_tokens
            self._costs.prefilled(prefilled, finished.prefill_time)
        between_tokens = iteration_stats.inter_token_latencies_iter  # by the engine's clock; one per trajectory decoded
        if between_tokens and iteration_stats.num_prompt_tokens == 0:  # else the step was a prefill as well
            self._step_times.add(len(between_tokens), statistics.median(between_tokens), self.kv_utilization)

    def log_engine_initialized(self) -> None:
        """Called by vLLM; nothing to log."""


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Refresh the copy of a tied embedding that vLLM's CPU build keeps for the output layer; it does not do so itself."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if hasattr(head, "cpu_linear") and method is not None:
        method.process_weights_after_loading(head)

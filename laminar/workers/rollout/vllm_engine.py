"""The vLLM inference engine, streaming through `AsyncLLM`.

Invariants: the version that a delta states is the one that vLLM itself stamped on every token of the trajectory (checked
at its end); weights change only while no stream is open, and the prefix cache never outlives the weights that made it.

vLLM is imported by `start`, after its environment is set: this module costs nothing where vLLM is missing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from laminar.errors import UserError
from laminar.workers.rollout.admission import check_request, check_weights
from laminar.workers.rollout.engine import EngineDelta, EngineLoad, EngineSettings, GenerationRequest
from laminar.workers.rollout.move_costs import MoveCosts
from laminar.workers.rollout.step_times import StepTimes
from laminar.workers.rollout.vllm_kv_moves import CONNECTOR, VllmKvMoves, check_connector
from laminar.workers.rollout.vllm_request import delta_of, sampling

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from laminar.workers.rollout.model_manifest import Manifest
    from laminar.workers.rollout.vllm_extension import LoadLogger

BLOCK_TOKENS = 32  # of the KV cache on CPU, whose attention kernel wants multiples of 32
# Tokens per delta; the first and the last are shorter. On CPU, where the event loop competes for the cores, batch 32 ran
# about 15% faster than with one token per delta.
STREAM_TOKENS = 8
CLOSE_SECONDS = 10.0  # how long vLLM's processes may take to end by themselves
_EXTENSION = "laminar.workers.rollout.vllm_extension"


def set_environment(settings: EngineSettings, *, cuda: bool) -> None:
    """Set what vLLM and its processes read from the environment; what the user has set stays.

    Without CUDA: no thread binding (it fails in containers, and engines would share cores), no torch.compile (the first
    request would wait for it for 14 s, and run at half speed after), threads as configured.
    """
    values = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if not cuda:
        values |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model runs in the engine process: one process less
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.threads),
            "TORCH_COMPILE_DISABLE": "1",
        }
    for name, value in values.items():
        os.environ.setdefault(name, value)


class VllmEngine:
    """`RolloutEngine` on vLLM; see `laminar.workers.rollout.engine` for the contract."""

    name = "vllm"

    def __init__(self, settings: EngineSettings) -> None:
        """Keep the settings; `start` loads the model."""
        self._settings = settings
        self._engine: AsyncLLM | None = None
        self._open: set[str] = set()
        self._aborted: set[str] = set()  # of the open ones: to be ended as soon as vLLM knows them
        self._policy_version = -1
        self._figures: LoadLogger | None = None
        self._costs = MoveCosts()
        self._kv_moves: VllmKvMoves | None = None
        self.step_times = StepTimes()
        self._vocabulary = 0
        self._manifest: Manifest = {}
        # vLLM's processes die with the thread that spawned them (see `vllm_extension`): it lives as long as the engine.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="vllm-spawner")
        self._building: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start vLLM's processes and load the model; seconds on a small model, during which the loop goes on.

        Raises:
            UserError: vLLM cannot be imported, or cannot run this model with these settings.
        """
        import torch

        cuda = torch.cuda.is_available()
        set_environment(self._settings, cuda=cuda)
        self._building = asyncio.get_running_loop().run_in_executor(self._spawner, self._build, cuda)
        await asyncio.shield(self._building)
        engine = self._require_engine()
        self._vocabulary = engine.model_config.get_vocab_size()
        await engine.collective_rpc("leave_nothing_behind")
        await engine.update_weight_version(str(self._policy_version))
        if self._settings.moves_kv:
            self._kv_moves = VllmKvMoves(engine, await engine.collective_rpc("kv_layout"), self._costs)

    def _build(self, cuda: bool) -> None:
        """Start vLLM, in the spawner thread. Sets the engine: a result would be kept alive by its future."""
        try:
            from vllm.v1.engine.async_llm import AsyncLLM

            from laminar.workers.rollout.model_manifest import manifest_of_folder
            from laminar.workers.rollout.vllm_extension import LoadLogger
        except (ImportError, RuntimeError) as error:  # RuntimeError: an operator that a stray torchvision lacks
            raise UserError(
                f"vLLM is installed but cannot be imported: {error}. Install the pinned set again "
                "(pip install -e .[cpu] or .[gpu]), or set rollout.engine: torch"
            ) from error
        if self._settings.moves_kv:
            check_connector()
        figures = self._figures = LoadLogger(self._costs, self.step_times)
        try:
            self._manifest = manifest_of_folder(self._settings.model_path, self._settings.dtype)
            arguments = self._arguments(cuda)
            self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: figures])
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"vLLM cannot serve model {self._settings.model_path!r} with these settings: {error}"
            ) from error

    def _arguments(self, cuda: bool) -> AsyncEngineArgs:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs

        from laminar.workers.rollout import vllm_extension

        settings = self._settings
        sharded = settings.tensor_parallel > 1
        return AsyncEngineArgs(
            model=settings.model_path,
            dtype=settings.dtype,
            seed=settings.seed,
            skip_tokenizer_init=True,  # token ids in, token ids out
            generation_config="vllm",  # the model folder's sampling defaults do not apply
            max_model_len=settings.context_tokens,
            max_num_seqs=settings.max_running,
            kv_cache_memory_bytes=settings.kv_cache_bytes,
            tensor_parallel_size=settings.tensor_parallel,
            logprobs_mode="processed_logprobs",
            enable_log_requests=False,
            stream_interval=STREAM_TOKENS,
            disable_log_stats=True,  # of vLLM's own loggers
            distributed_executor_backend=(
                vllm_extension.ShardedExecutor if sharded else vllm_extension.InProcessExecutor
            ),
            worker_extension_cls=f"{_EXTENSION}.WorkerExtension",
            block_size=None if cuda else BLOCK_TOKENS,
            enforce_eager=not cuda,
            kv_transfer_config=(
                KVTransferConfig(
                    kv_connector="KvMoveConnector",
                    kv_connector_module_path=CONNECTOR,
                    kv_role="kv_both",
                    kv_load_failure_policy="recompute",
                )
                if settings.moves_kv
                else None
            ),
        )

    def generate(self, request: GenerationRequest) -> AsyncIterator[EngineDelta]:
        """Stream one trajectory; it is queued when the iteration begins.

        Raises:
            ValueError: at once, if it cannot be generated or its id is in use.
            RuntimeError: while iterating, if vLLM failed, or stamped another version on a token.
        """
        check_request(request, self._settings, self._vocabulary)
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id!r}: a stream with this id is open")
        return self._stream(request)

    async def _stream(self, request: GenerationRequest) -> AsyncIterator[EngineDelta]:
        from vllm.inputs.engine import tokens_input

        engine, request_id = self._require_engine(), request.request_id
        if request_id in self._open:
            raise ValueError(f"request {request_id!r}: a stream with this id is open")
        self._open.add(request_id)
        policy_version = self._policy_version
        context = np.concatenate([request.prompt_token_ids, request.token_ids]).tolist()
        moves, ended = self._kv_moves, False
        try:
            parameters = await moves.parameters(request, policy_version) if moves else None
            outputs = await engine.add_request(request_id, tokens_input(context), sampling(request, parameters))
            if request_id in self._aborted:
                await engine.abort(request_id)
            while not ended:
                output = outputs.get_nowait() or await outputs.get()
                self._require_engine()
                delta = delta_of(output.outputs[0], policy_version)
                ended = delta.finish_reason is not None
                if moves:
                    imported = await moves.imported(request_id)
                    exported = await moves.exported(request_id) if delta.finish_reason == "abort" else None
                    delta = dataclasses.replace(delta, imported=imported, exported=exported)
                if ended:  # before the last delta is out, so that its receiver may load weights at once
                    self._forget(request_id)
                yield delta
        except Exception as error:  # an error of vLLM's, of whatever class
            raise RuntimeError(f"vLLM failed on request {request_id!r}: {error}") from error
        finally:
            if not ended:
                self._forget(request_id)
                if self._engine is not None and not engine.errored:
                    await engine.abort(request_id)

    def _forget(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._aborted.discard(request_id)
        if self._kv_moves:
            self._kv_moves.forget(request_id)

    async def abort(self, request_id: str, export: Path | None = None) -> None:
        """End a stream at once, its KV written to `export`; what the step in progress makes for it is dropped."""
        if request_id in self._open:
            self._aborted.add(request_id)
            abort = self._require_engine().abort(request_id)
            if export is None or not self._kv_moves:
                await abort
            else:  # sent in this order, but without waiting a step for the first answer
                await asyncio.gather(self._kv_moves.want_export(request_id, export), abort)

    async def load_weights(self, path: str, policy_version: int) -> None:
        """Load the version's tensors in vLLM's workers and drop the prefix cache.

        Raises:
            RuntimeError: a stream is open, or a worker could not load the file; after the latter the engine is unusable.
            FileNotFoundError: no such file (any more).
            ValueError: the file does not hold this version, or not of this model; the engine keeps what it had.
        """
        from laminar.workers.rollout.model_manifest import check_manifest

        engine = self._require_engine()
        if self._open:
            raise RuntimeError(
                f"weights of version {policy_version} cannot be loaded while {len(self._open)} streams are open"
            )
        check_weights(path, policy_version)
        check_manifest(path, self._manifest)
        try:
            await engine.collective_rpc("load_policy", args=(path,))
        except Exception as error:  # vLLM raises a plain Exception for an error in a worker
            raise RuntimeError(f"vLLM could not load version {policy_version} from {path}: {error}") from error
        if not await engine.reset_prefix_cache():
            raise RuntimeError(f"vLLM kept its prefix cache when version {policy_version} was loaded")
        await engine.update_weight_version(str(policy_version))
        self._policy_version = policy_version

    async def serve_own_weights(self, policy_version: int) -> None:
        """See `RolloutEngine`."""
        await self._require_engine().update_weight_version(str(policy_version))
        self._policy_version = policy_version

    def load(self) -> EngineLoad:
        """Load after vLLM's last step; vLLM reports nothing when it is idle."""
        opened = len(self._open)
        running, utilization = 0, 0.0
        if self._figures is not None and opened:
            running, utilization = min(self._figures.running, opened), self._figures.kv_utilization
        return EngineLoad(
            running=running,
            waiting=opened - running,
            kv_utilization=utilization,
            prefill_s_per_token=self._costs.prefill_s_per_token,
            kv_move_s_per_token=self._costs.kv_move_s_per_token,
        )

    async def close(self) -> None:
        """End vLLM's processes and free their shared memory; open streams fail.

        An engine that is still starting has to be waited for; the worker's exit limit ends that.
        """
        if self._building is not None:
            await asyncio.wait([self._building])
        engine, self._engine, self._kv_moves = self._engine, None, None
        if engine is not None:
            if self._open and not engine.errored:
                await engine.abort(list(self._open))  # wakes the streams, which see that the engine is gone
            if engine.output_handler is not None:  # would report its engine's end as an error
                engine.output_handler.cancel()
                await asyncio.wait([engine.output_handler], timeout=CLOSE_SECONDS)
            await asyncio.to_thread(engine.shutdown, CLOSE_SECONDS)
            del engine
            gc.collect()  # AsyncLLM is part of cycles; its finalizer fails if it runs as late as at interpreter exit
        await asyncio.to_thread(self._spawner.shutdown)

    def _require_engine(self) -> AsyncLLM:
        if self._engine is None:
            raise RuntimeError("the vLLM engine was not started, or was closed")
        return self._engine

"""vLLM's KV connector of ours: exports an aborted request's blocks, imports them into another engine's request.

vLLM makes two instances per engine, by module path: the scheduler's says which blocks, the worker's (one per shard) copies
them. What a request is to import or may export comes in its `kv_transfer_params`:

  id              our request id (vLLM's own has a suffix)
  policy_version  that serves it
  import_from, import_tokens   files checked by `VllmEngine`, and how many positions of the context they hold

Where an aborted request's blocks go the workers are told before the abort (`want_export`); without that they are not copied.

Invariants: whole blocks are copied, so that no layout within a block matters; a file is complete before the abort's blocks
are freed; a load that fails has its blocks recomputed by vLLM and is reported, never raised.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from laminar.workers.rollout.kv_file import KvReader, KvRefused, KvWriter, shard_path

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger("laminar.rollout")


@dataclass(kw_only=True, slots=True)
class BlockExport:
    """Blocks of a request that was aborted; none of one that has finished by itself, whose abort comes too late."""

    vllm_id: str
    request_id: str
    policy_version: int
    token_ids: list[int]  # at the positions that are computed
    blocks: list[int]


@dataclass(kw_only=True, slots=True)
class BlockImport:
    """Blocks to fill from a file."""

    request_id: str
    path: str
    first: int  # block of the file to begin with: those before are in the prefix cache
    blocks: list[int]  # where they go


@dataclass
class KvMoves(KVConnectorMetadata):
    """What the worker's instances do in one step."""

    exports: list[BlockExport] = field(default_factory=list)
    imports: list[BlockImport] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Moved:
    """What came of one export or import; sent to the client by `collective_rpc`."""

    tokens: int
    nbytes: int
    seconds: float
    error: str


class KvMoveConnector(KVConnectorBase_V1):
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Called by vLLM."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._model = (
            f"{vllm_config.model_config.hf_config.model_type} {vllm_config.parallel_config.tensor_parallel_size}"
        )
        # The scheduler's.
        self._next = KvMoves()
        self._to_load: dict[str, BlockImport] = {}  # by vLLM's id
        self._loaded: set[str] = set()
        # The worker's.
        self._layers: list[torch.Tensor] = []  # [blocks, ...] each
        self._wanted: dict[str, str] = {}  # request -> path of its export
        self._exported: dict[str, Moved] = {}
        self._imported: dict[str, Moved] = {}
        self._damaged: set[int] = set()

    # ------------------------------------------------------------ the scheduler's

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Positions that the request's file has beyond vLLM's own prefix cache."""
        params = request.kv_transfer_params or {}
        if not params.get("import_from") or request.request_id in self._loaded:
            return 0, False  # after a preemption the file may be gone
        return max(0, params["import_tokens"] - num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks are there for what `get_num_new_matched_tokens` offered."""
        params = request.kv_transfer_params
        if not num_external_tokens or not params:
            return
        self._loaded.add(request.request_id)
        first = (params["import_tokens"] - num_external_tokens) // self._block_tokens
        end = -(-params["import_tokens"] // self._block_tokens)
        self._to_load[request.request_id] = BlockImport(
            request_id=params["id"], path=params["import_from"], first=first, blocks=list(range(first, end))
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KvMoves:
        """What the workers are to do with this step."""
        for new in scheduler_output.scheduled_new_reqs:
            load = self._to_load.pop(new.req_id, None)
            if load is not None:
                load.blocks = [new.block_ids[0][index] for index in load.blocks]
                self._next.imports.append(load)
        moves, self._next = self._next, KvMoves()
        return moves

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep an aborted request's blocks until they are copied."""
        self._loaded.discard(request.request_id)
        self._to_load.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        # A step that is under way may still write the last position.
        tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
        if not params:
            return False, None
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        tokens = max(tokens, 0) if aborted else 0
        blocks = -(-tokens // self._block_tokens)
        self._next.exports.append(
            BlockExport(
                vllm_id=request.request_id,
                request_id=params["id"],
                policy_version=params["policy_version"],
                token_ids=list(request.all_token_ids[:tokens]),
                blocks=block_ids[:blocks],
            )
        )
        return tokens > 0, None

    # ------------------------------------------------------------ the worker's, called by vLLM

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the layers' tensors, in the model's order."""
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Fill the blocks of this step's imports before its forward pass."""
        for load in self._moves().imports:
            started = time.perf_counter()
            try:
                tokens, nbytes = self._load(load)
                error = ""
            except KvRefused as refusal:
                tokens, nbytes, error = 0, 0, str(refusal)
                self._damaged.update(load.blocks)
            seconds = time.perf_counter() - started
            self._imported[load.request_id] = Moved(tokens=tokens, nbytes=nbytes, seconds=seconds, error=error)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: `start_load_kv` has copied."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: blocks are copied when their request is aborted."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Copy out the blocks of this step's exports; vLLM may free them all then."""
        done = set()
        for export in self._moves().exports:
            if export.token_ids:  # else its blocks were not kept
                done.add(export.vllm_id)
            path = self._wanted.pop(export.request_id, None)
            if path is not None:
                self._exported[export.request_id] = self._export(export, Path(path))
        return done or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute itself."""
        damaged, self._damaged = self._damaged, set()
        return damaged

    # ------------------------------------------------------------ the worker's, called by `WorkerExtension`

    def layout(self) -> str:
        """How a file of this shard's blocks is laid out; only engines of the same layout exchange them."""
        shapes = sorted({tuple(layer.shape[1:]) for layer in self._layers})
        kind = self._layers[0]
        place = kind.device.type if kind.is_cuda else f"cpu {torch.backends.cpu.get_cpu_capability()}"
        return (
            f"vllm {self._model} shard {get_tensor_model_parallel_rank()}, {len(self._layers)} layers of "
            f"{self._block_tokens} tokens in {shapes} {kind.dtype} on {place}"
        )

    def want_export(self, request_id: str, path: str) -> None:
        """The request's abort, which comes next, is to export its blocks."""
        self._wanted[request_id] = path

    def take_export(self, request_id: str, *, last: bool) -> Moved | None:
        """What came of it; None as long as the abort has not been seen. `last`: nobody waits any longer."""
        if last:
            self._wanted.pop(request_id, None)
        return self._exported.pop(request_id, None)

    def take_import(self, request_id: str) -> Moved | None:
        """What came of an import; None if vLLM had all in its prefix cache."""
        return self._imported.pop(request_id, None)

    # ------------------------------------------------------------ files

    def _moves(self) -> KvMoves:
        moves = self._get_connector_metadata()
        assert isinstance(moves, KvMoves)
        return moves

    def _export(self, export: BlockExport, path: Path) -> Moved:
        if not export.token_ids:
            return Moved(tokens=0, nbytes=0, seconds=0.0, error="nothing was computed yet")
        started = time.perf_counter()
        try:
            nbytes = self._save(export, path)
        except OSError as failure:
            return Moved(tokens=0, nbytes=0, seconds=0.0, error=str(failure))
        seconds = time.perf_counter() - started
        return Moved(tokens=len(export.token_ids), nbytes=nbytes, seconds=seconds, error="")

    def _save(self, export: BlockExport, path: Path) -> int:
        """Bytes written. Raises OSError if there is no memory for them."""
        blocks = len(export.blocks)
        writer = KvWriter(
            shard_path(path, get_tensor_model_parallel_rank()),
            layout=self.layout(),
            policy_version=export.policy_version,
            token_ids=np.array(export.token_ids, np.int32),
            nbytes=sum(blocks * self._block_bytes(layer) for layer in self._layers),
        )
        with writer:
            pieces = self._pieces(writer.buffer, blocks)
            for layer, piece in zip(self._layers, pieces, strict=True):
                piece.copy_(layer[torch.tensor(export.blocks, device=layer.device)])
            del piece, pieces
            writer.commit()
            return writer.file_bytes

    def _load(self, load: BlockImport) -> tuple[int, int]:
        """(positions, bytes of the file). Raises KvRefused if the file is gone or does not fit."""
        with KvReader(shard_path(Path(load.path), get_tensor_model_parallel_rank())) as reader:
            if reader.layout != self.layout():
                raise KvRefused(f"{reader.path.name}: laid out as {reader.layout!r}, expected {self.layout()!r}")
            held = -(-len(reader.token_ids) // self._block_tokens)
            if load.first + len(load.blocks) > held:
                raise KvRefused(f"{reader.path.name}: {held} blocks")
            pieces = self._pieces(reader.payload(), held)
            for layer, piece in zip(self._layers, pieces, strict=True):
                wanted = piece[load.first : load.first + len(load.blocks)]
                layer[torch.tensor(load.blocks, device=layer.device)] = wanted.to(layer.device)
            del piece, pieces
            return len(reader.token_ids), reader.file_bytes

    def _pieces(self, memory: NDArray[np.uint8], blocks: int) -> list[torch.Tensor]:
        """Each layer's blocks as they lie in the file: [blocks, ...]."""
        flat, start, pieces = torch.frombuffer(memory, dtype=torch.uint8), 0, []
        for layer in self._layers:
            nbytes = blocks * self._block_bytes(layer)
            pieces.append(flat[start : start + nbytes].view(layer.dtype).view(blocks, *layer.shape[1:]))
            start += nbytes
        return pieces

    @staticmethod
    def _block_bytes(layer: torch.Tensor) -> int:
        return int(np.prod(layer.shape[1:])) * layer.dtype.itemsize

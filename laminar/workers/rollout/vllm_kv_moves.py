"""KV moves as the client of vLLM sees them: files are checked before vLLM is told of them, outcomes are fetched afterwards.

Invariant: nothing here fails a request. What cannot be exported or imported is prefilled, and the reason is reported.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from laminar.errors import UserError
from laminar.workers.rollout.engine import GenerationRequest, KvExported, KvImported
from laminar.workers.rollout.kv_file import KvReader, KvRefused, shard_path
from laminar.workers.rollout.move_costs import MoveCosts

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CONNECTOR = "laminar.workers.rollout.vllm_kv_connector"
EXPORT_LIMIT_S = 5.0  # for vLLM to see an abort and copy the blocks; then the trajectory goes on without

log = logging.getLogger("laminar.rollout")


class VllmKvMoves:
    """One engine's exports and imports."""

    def __init__(self, engine: AsyncLLM, layouts: list[str], costs: MoveCosts) -> None:
        """`layouts`: of the KV of each shard."""
        self._engine = engine
        self._layouts = layouts
        self._costs = costs
        self._checked: dict[str, tuple[int, float, str]] = {}  # request -> positions, seconds of the check, refusal
        self._exports: dict[str, Path] = {}  # requests whose abort exports

    async def parameters(self, request: GenerationRequest, policy_version: int) -> dict[str, Any]:
        """What the connector has to know of a request."""
        parameters: dict[str, Any] = {"id": request.request_id, "policy_version": policy_version}
        if request.kv is not None:
            started = time.perf_counter()
            context = np.concatenate([request.prompt_token_ids, request.token_ids])
            try:
                tokens = await asyncio.to_thread(self._check, request.kv, context, policy_version)
                refusal = ""
                parameters |= {"import_from": str(request.kv), "import_tokens": tokens}
            except KvRefused as refused:
                tokens, refusal = 0, str(refused)
            self._checked[request.request_id] = (tokens, time.perf_counter() - started, refusal)
        return parameters

    def _check(self, path: Path, context: NDArray[np.int32], policy_version: int) -> int:
        """Positions that all shards hold, undamaged. Raises KvRefused."""
        held = len(context)
        for shard, layout in enumerate(self._layouts):
            with KvReader(shard_path(path, shard)) as reader:
                tokens = reader.check(layout=layout, policy_version=policy_version, context=context, least=1)
                held = min(held, tokens)
                reader.payload()
        return held

    async def imported(self, request_id: str) -> KvImported | None:
        """What became of the KV that came with this request; asked at its first output."""
        if request_id not in self._checked:
            return None
        tokens, seconds, refusal = self._checked.pop(request_id)
        if not refusal:
            moved = await self._engine.collective_rpc("take_kv_import", args=(request_id,))
            shards = [shard for shard in moved if shard is not None]
            refusal = next((error for _, _, _, error in shards if error), "")
            if not shards:  # vLLM had all in its prefix cache, or the request was aborted before it was its turn
                return KvImported(tokens=0, nbytes=0, seconds=0.0, error="")
            if not refusal:
                seconds += max(spent for _, _, spent, _ in shards)
                self._costs.imported(tokens, seconds)
                nbytes = sum(size for _, size, _, _ in shards)
                return KvImported(tokens=tokens, nbytes=nbytes, seconds=seconds, error="")
        log.warning("KV of %s was not taken, it is prefilled: %s", request_id, refusal)
        return KvImported(tokens=0, nbytes=0, seconds=0.0, error=refusal)

    async def want_export(self, request_id: str, path: Path) -> None:
        """The abort of this request, which comes next, exports its blocks."""
        self._exports[request_id] = path
        await self._engine.collective_rpc("want_kv_export", args=(request_id, str(path)))

    async def exported(self, request_id: str) -> KvExported | None:
        """What an abort has exported; None if it was not asked to, or could not."""
        if self._exports.pop(request_id, None) is None:
            return None
        until = time.monotonic() + EXPORT_LIMIT_S
        last = False
        while True:  # each question is answered between two of vLLM's steps, of which one exports
            moved = await self._engine.collective_rpc("take_kv_export", args=(request_id, last))
            if all(shard is not None for shard in moved):
                break
            if last:
                log.warning("KV of %s was not exported: vLLM has not said so in time", request_id)
                return None
            last = time.monotonic() > until
        error = next((error for _, _, _, error in moved if error), "")
        if error:
            log.warning("KV of %s was not exported: %s", request_id, error)
            return None
        tokens, seconds = moved[0][0], max(spent for _, _, spent, _ in moved)
        self._costs.exported(tokens, seconds)
        nbytes = sum(size for _, size, _, _ in moved)
        return KvExported(tokens=tokens, nbytes=nbytes, shards=len(moved), seconds=seconds)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._checked.pop(request_id, None)
        self._exports.pop(request_id, None)


def check_connector() -> None:
    """Raises UserError if our KV connector cannot be loaded into this vLLM: its interface is experimental, and may change."""
    try:
        connector: Any = importlib.import_module(CONNECTOR).KvMoveConnector
    except (ImportError, AttributeError) as error:
        reason = str(error)
    else:
        missing = sorted(getattr(connector, "__abstractmethods__", ()))
        reason = f"vLLM asks for {', '.join(missing)}" if missing else ""
    if reason:
        raise UserError(
            f"repack.move_kv: the KV connector {CONNECTOR} cannot be loaded into this vLLM ({reason}): install the pinned set "
            "again (pip install -e .[cpu] or .[gpu]), or set repack.move_kv: never"
        )

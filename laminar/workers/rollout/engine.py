"""The small protocol behind which inference engines stand; one instance serves one replica.

Contract, the same for every engine and tested by the same tests:
- A stream yields each token once, in order, with the logprob under the temperature-scaled distribution that it was
  drawn from (float32; temperature 0 is greedy and gives the unscaled model's logprob), and ends with one delta that
  has a `finish_reason`.
- After `abort` the stream ends with "abort", having yielded every token that the engine had produced. Prompt plus these
  tokens, given to any other replica of the same version, continue the same greedy sequence.
- After `abort` with an export path the trajectory's KV lies there, complete, before the last delta comes; that delta says
  so. A request with such a file decodes on without prefill, exactly as if it had never moved. A file that does not fit (or
  is gone, or damaged) costs a prefill and never more; the first delta says which it was. The file is the caller's to remove.
- `load_weights` is called only while no stream is open. Afterwards the outputs are exactly those of the new weights
  (tied embeddings and any prefix cache included), and every delta states the new version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from laminar.workers.rollout.step_times import StepTimes


@dataclass(kw_only=True, slots=True, frozen=True)
class GenerationRequest:
    """One trajectory to generate, or to continue when `token_ids` is not empty."""

    request_id: str  # unique among open streams
    prompt_token_ids: NDArray[np.int32]  # int32 [P]
    token_ids: NDArray[np.int32]  # int32 [T], generated before (by any replica of the same version)
    max_new_tokens: int  # tokens still to generate at most, T not counted
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    kv: Path | None = None  # exported KV of prompt and token_ids, all but the last; its shards are `kv_file.shard_path`


@dataclass(kw_only=True, slots=True, frozen=True)
class KvExported:
    """An engine has written a trajectory's KV."""

    tokens: int  # positions, from 0 on
    nbytes: int  # of all files
    shards: int  # files
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class KvImported:
    """What became of the KV that came with a request."""

    tokens: int  # positions that were filled from it; 0 where there is an error, or where they were at hand already
    nbytes: int
    seconds: float
    error: str  # why all was prefilled; empty if it was not


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineDelta:
    """What one stream gained."""

    token_ids: NDArray[np.int32]  # int32 [D]; the stop token is included
    logprobs: NDArray[np.float32]  # float32 [D]
    policy_version: int  # the version that made these tokens, as the engine knows it
    finish_reason: str | None  # "stop" | "length" | "abort", None while it goes on
    exported: KvExported | None = None  # in the last delta, where the abort asked for it and it could be done
    imported: KvImported | None = None  # in the first delta of a request with KV


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineLoad:
    """Load figures at one moment."""

    running: int  # trajectories being decoded
    waiting: int  # trajectories queued inside the engine
    kv_utilization: float  # share of the KV cache in use, 0 to 1
    prefill_s_per_token: float = 0.0  # seconds per token of context, as measured lately; 0: not yet
    kv_move_s_per_token: float = 0.0  # seconds to export and import the KV of a token, likewise


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineSettings:
    """What an engine is started with; made from the experiment config by the rollout worker."""

    model_path: str
    dtype: str  # "float32" | "bfloat16"
    context_tokens: int  # prompt and response together
    max_running: int  # trajectories decoded at once
    kv_cache_bytes: int
    tensor_parallel: int
    threads: int  # CPU threads for the forward pass
    seed: int
    moves_kv: bool = False  # exports and imports KV; otherwise both are refused and every move prefills
    several_turns: bool = False  # trajectories that have ended may come back with their tokens and a few more


class RolloutEngine(Protocol):
    """An inference engine that holds one policy version at a time."""

    name: str  # "vllm" | "torch"
    step_times: StepTimes  # of its decode steps

    async def start(self) -> None:
        """Load the model; returns when requests can be served (the version is then -1: no weights pulled yet)."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[EngineDelta]:
        """Stream one trajectory. Raises ValueError if prompt and response cannot fit the context."""
        ...

    async def abort(self, request_id: str, export: Path | None = None) -> None:
        """End a stream as early as possible, its KV written to `export`; unknown ids are ignored (it may just have ended)."""
        ...

    async def load_weights(self, path: str, policy_version: int) -> None:
        """Take the weights of the committed version file at `path` in place. Raises RuntimeError if a stream is open."""
        ...

    async def serve_own_weights(self, policy_version: int) -> None:
        """Call the weights that `start` has loaded from the model folder by this version; none others were loaded since."""
        ...

    def load(self) -> EngineLoad:
        """Current load; cheap enough to be called twice a second."""
        ...

    async def close(self) -> None:
        """Free everything, child processes and shared memory included."""
        ...

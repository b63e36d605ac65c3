"""A rollout worker whose responses have prescribed, long-tailed lengths: `benchmarks/repack.py` starts it for real runs.

    python benchmarks/long_tailed_rollout.py --connect RUN_DIR --index I

Engine, tokens, weights and messages are those of `laminar.workers.rollout.main`. Only where a response ends is prescribed: after
a number of tokens that is drawn from a log-normal distribution by the trajectory's id, so that runs with the same seed have the
same lengths. With a pace, no decode step is shorter than that (with vLLM no step that computes tokens, those with a prefill
included): it stands for a GPU of the rollout's own, whose steps do not get slower because the other rollouts of this machine work
as well.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from long_tail import Tail

from laminar.workers.rollout import main as rollout_main
from laminar.workers.rollout import torch_engine
from laminar.workers.rollout.decode_batch import DecodeBatch
from laminar.workers.rollout.engine import EngineDelta, EngineSettings, GenerationRequest, RolloutEngine
from laminar.workers.rollout.torch_engine import TorchEngine
from laminar.workers.rollout.vllm_engine import VllmEngine

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs


def shortened(request: GenerationRequest, tail: Tail) -> GenerationRequest:
    """The request, to end after the prescribed number of tokens and at no stop token."""
    trajectory_id = request.request_id.rpartition("/")[0]
    left = max(1, tail.tokens(trajectory_id) - len(request.token_ids))
    return replace(request, max_new_tokens=min(left, request.max_new_tokens), stop_token_ids=())


class LongTailedTorch(TorchEngine):
    """The torch engine with prescribed lengths."""

    def __init__(self, settings: EngineSettings, tail: Tail) -> None:
        super().__init__(settings)
        self._tail = tail

    def generate(self, request: GenerationRequest) -> AsyncIterator[EngineDelta]:
        return super().generate(shortened(request, self._tail))


class LongTailedVllm(VllmEngine):
    """The vLLM engine with prescribed lengths, and with the pace."""

    def __init__(self, settings: EngineSettings, tail: Tail) -> None:
        super().__init__(settings)
        self._tail = tail

    def generate(self, request: GenerationRequest) -> AsyncIterator[EngineDelta]:
        return super().generate(shortened(request, self._tail))

    def _arguments(self, cuda: bool) -> AsyncEngineArgs:
        from paced_vllm import PacedExecutor

        arguments = super()._arguments(cuda)
        if self._tail.pace_s:
            arguments.distributed_executor_backend = PacedExecutor
        return arguments


class PacedBatch(DecodeBatch):
    """No decode step is shorter than the pace."""

    pace_s = 0.0

    def _decode(self) -> list[Any]:
        started = time.perf_counter()
        finished = super()._decode()
        time.sleep(max(0.0, self.pace_s - (time.perf_counter() - started)))
        return list(finished)


def choose_engine(name: str, settings: EngineSettings) -> tuple[RolloutEngine, str]:
    """In the place of `laminar.workers.rollout.engines.choose_engine`: `vllm`, or else `torch`."""
    tail = Tail.of_environment()
    if name == "vllm":
        return LongTailedVllm(settings, tail), "prescribed lengths"
    if tail.pace_s:
        PacedBatch.pace_s = tail.pace_s
        torch_engine.DecodeBatch = PacedBatch  # type: ignore[attr-defined, misc]
    return LongTailedTorch(settings, tail), "prescribed lengths"


if __name__ == "__main__":
    rollout_main.choose_engine = choose_engine  # type: ignore[attr-defined]
    rollout_main.main()

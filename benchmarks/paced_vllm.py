"""vLLM's executor with a pace, for `long_tailed_rollout.py`: vLLM's engine process imports this module by its name."""

from __future__ import annotations

import time
from typing import Any

from long_tail import Tail

from laminar.workers.rollout.vllm_extension import InProcessExecutor


class PacedExecutor(InProcessExecutor):
    """No step that computes tokens is shorter than the pace; what comes between steps (KV moves, weights) waits as for a GPU's."""

    def _init_executor(self) -> None:
        self._pace_s = Tail.of_environment().pace_s
        self._began = 0.0
        super()._init_executor()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Called by vLLM, first of a step; a step without tokens ends here."""
        self._began = time.perf_counter()
        return super().execute_model(scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Called by vLLM, last of a step."""
        sampled = super().sample_tokens(grammar_output, non_block)
        time.sleep(max(0.0, self._pace_s - (time.perf_counter() - self._began)))
        return sampled

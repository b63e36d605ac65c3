"""One trajectory in the torch engine: what it was asked for, and what it has gained."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from laminar.workers.rollout.engine import GenerationRequest, KvExported, KvImported


@dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """One trajectory in the engine: waiting or running."""

    request: GenerationRequest
    stop_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)  # generated here
    logprobs: list[float] = field(default_factory=list)  # one per token_ids
    taken: int = 0  # of them
    left: int  # tokens that may still be generated
    finish_reason: str | None = None
    exported: KvExported | None = None
    imported: KvImported | None = None  # not yet taken

    def context(self) -> NDArray[np.int32]:
        """int32 [P + T], the tokens to start from."""
        return np.concatenate([self.request.prompt_token_ids, self.request.token_ids])

    def take(self) -> tuple[list[int], list[float]]:
        """What was generated since the last call."""
        since, self.taken = self.taken, len(self.token_ids)
        return self.token_ids[since:], self.logprobs[since:]

    def take_imported(self) -> KvImported | None:
        """What became of the KV that came with it; once."""
        imported, self.imported = self.imported, None
        return imported

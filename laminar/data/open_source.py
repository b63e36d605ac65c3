"""From `data.source` to the source that it describes.

Invariant: every process that opens the same configuration sees the same entries in the same order.
"""

from __future__ import annotations

from laminar.config.schema import ExperimentConfig, JsonlSource
from laminar.data.jsonl_source import JsonlPrompts
from laminar.data.reasoning_gym_source import ReasoningGymPrompts
from laminar.data.source import PromptSource


def open_source(config: ExperimentConfig) -> PromptSource:
    """The source of prompts of an experiment; reasoning-gym is imported only where it is used.

    Raises:
        UserError: the file, a name or a parameter is wrong.
    """
    source = config.data.source
    if isinstance(source, JsonlSource):
        return JsonlPrompts(source, config.seed)
    return ReasoningGymPrompts(source, config.seed)


def total_prompts(config: ExperimentConfig, source: PromptSource) -> int | None:
    """Positions in the data order over all epochs; None when it never ends."""
    return None if source.size is None else source.size * config.data.epochs

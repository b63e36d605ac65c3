"""From `data.source` to the source that it describes.

Invariant: every process that opens the same configuration sees the same entries in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from laminar.config.data_schema import (
    HuggingFaceSource,
    JsonlSource,
    MixtureSource,
    ParquetSource,
    ReasoningGymSource,
    RowSource,
    SingleSource,
)
from laminar.config.schema import ExperimentConfig
from laminar.data.dataset_folder import dataset_files, parquet_files
from laminar.data.jsonl_rows import JsonlRows
from laminar.data.mixture_source import MixedPrompts
from laminar.data.reasoning_gym_source import ReasoningGymPrompts, component_labels
from laminar.data.row_source import RowPrompts
from laminar.data.rows import Rows
from laminar.data.source import PromptSource, derive_seed


def open_source(config: ExperimentConfig) -> PromptSource:
    """The source of prompts of an experiment; reasoning-gym and pyarrow are imported only where they are used.

    Raises:
        UserError: the file, a name or a parameter is wrong.
    """
    source = config.data.source
    if not isinstance(source, MixtureSource):
        return open_single(source, config.seed, "data.source")
    seed = config.seed if source.seed is None else source.seed
    return MixedPrompts(
        [open_single(single, config.seed, key) for key, single in config.data.single_sources()],
        [component.weight for component in source.sources],
        seed=derive_seed(seed, "mixture"),
        prompts=source.prompts,
    )


def open_single(source: SingleSource, seed: int, key: str) -> PromptSource:
    """A source that is no mixture; `key` is its place in the configuration.

    Raises:
        UserError: as `open_source`.
    """
    if isinstance(source, ReasoningGymSource):
        return ReasoningGymPrompts(source, seed, key)
    return RowPrompts(source, open_rows(source, key), seed=seed, key=key)


def open_rows(source: RowSource, key: str) -> Rows:
    """The rows of a file or folder.

    Raises:
        UserError: it is missing, empty or damaged.
    """
    if isinstance(source, JsonlSource):
        return JsonlRows(source.path, f"{key}.path")
    from laminar.data.arrow_rows import ArrowRows

    path = Path(source.path)
    if isinstance(source, ParquetSource):
        files = parquet_files(path, key)
    else:
        assert isinstance(source, HuggingFaceSource)
        files = dataset_files(path, source.split, key)
    return ArrowRows(path.resolve().name, files, f"{key}.path")


def total_prompts(config: ExperimentConfig, source: PromptSource) -> int | None:
    """Positions in the data order over all epochs; None when it never ends."""
    return None if source.size is None else source.size * config.data.epochs


def source_names(config: ExperimentConfig) -> Iterator[str]:
    """What the entries of each source say that they came from (`Entry.source`)."""
    for _, source in config.data.single_sources():
        if isinstance(source, ReasoningGymSource):
            yield from component_labels(source.datasets)
        else:
            yield source.name or Path(source.path).resolve().name

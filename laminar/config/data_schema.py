"""The section `data`: sources of prompts, and how their entries become token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Section

Layout = Literal["fields", "gsm8k", "dapo_math_17k", "aime", "math", "verl"]


class ReasoningGymComponent(Section):
    """One reasoning-gym generator in a mixture."""

    name: str
    """Name of a reasoning-gym data set, for example `spell_backward`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts, relative to the other components."""
    params: dict[str, int | float | str | bool | list[int | float | str]] = {}
    """Parameters of the generator, handed on as they are."""


class ReasoningGymSource(Section):
    """Prompts made by reasoning-gym generators; never exhausted unless `prompts` is set."""

    type: Literal["reasoning_gym"]
    datasets: Annotated[list[ReasoningGymComponent], Field(min_length=1)]
    """The mixture."""
    seed: int | None = None
    """Seed of the generators; the experiment's seed if not given."""
    prompts: Annotated[int | None, Field(ge=1)] = None
    """Number of distinct prompts in an epoch; without it the generators never end."""


class FileSource(Section):
    """What all sources have in common that read rows from files."""

    path: str
    """The file, or for `parquet` and `hugging_face` the folder; relative to the working directory."""
    format: Layout = "fields"
    """Layout of the columns: `fields` (`prompt_field`, `answer_field`), or a public one by name: `gsm8k`, `dapo_math_17k`, `aime`, `math` (Hendrycks' MATH, MATH-500), `verl` (the layout that verl's recipes write)."""
    prompt_field: str = "prompt"
    """`format: fields`: column of the prompt, text or a list of chat messages."""
    answer_field: str = "answer"
    """`format: fields`: column of the expected answer; rows without it get an empty one."""
    name: str | None = None
    """What rewards and logs call these prompts (`source`); the name of the file or folder if not given."""
    shuffle: bool = True
    """Permute the rows anew for every epoch, from the seed."""
    seed: int | None = None
    """Seed of the permutations; the experiment's seed if not given."""


class JsonlSource(FileSource):
    """Prompts from a JSON Lines file, one object per line."""

    type: Literal["jsonl"]


class ParquetSource(FileSource):
    """Prompts from a Parquet file, or from all `*.parquet` files of a folder in the order of their names."""

    type: Literal["parquet"]


class HuggingFaceSource(FileSource):
    """Prompts from a Hugging Face data set on disk: what `save_to_disk` wrote, or a folder of Parquet shards as on the hub."""

    type: Literal["hugging_face"]
    split: str | None = None
    """Split to take; needed where the folder holds several."""


RowSource = JsonlSource | ParquetSource | HuggingFaceSource
SingleSource = ReasoningGymSource | RowSource


class MixtureComponent(Section):
    """One source of a mixture."""

    source: Annotated[SingleSource, Field(discriminator="type")]
    """Any source that is not a mixture itself; its keys are those under `data.source`."""
    weight: Annotated[float | None, Field(gt=0)] = None
    """Share of the prompts, relative to the other sources. Without any weights each source counts by its size, and one epoch serves every row once."""


class MixtureSource(Section):
    """Prompts from several sources, spread evenly by weight; each goes through its own data in its own order."""

    type: Literal["mixture"]
    sources: Annotated[list[MixtureComponent], Field(min_length=1)]
    """The sources; at most one of them `reasoning_gym`, which is a mixture of generators itself."""
    seed: int | None = None
    """Seed of the pattern; the experiment's seed if not given."""
    prompts: Annotated[int | None, Field(ge=1)] = None
    """Prompts in an epoch; without it as many as the sources hold together, or no end if one of them has none."""


PromptSourceConfig = Annotated[SingleSource | MixtureSource, Field(discriminator="type")]


class DataConfig(Section):
    """Where prompts come from and how they become token ids."""

    source: PromptSourceConfig
    """The prompts."""
    prompt_template: str = "{question}"
    """`str.format` template over `question` (the prompt's text) and the entry's metadata fields."""
    chat: bool = False
    """Wrap the prompt as a user message by the tokenizer's chat template."""
    chat_template: str | None = None
    """File with a Jinja chat template to use instead of the tokenizer's own; needs `chat`."""
    chat_template_params: dict[str, bool | int | float | str] = {}
    """Variables for the chat template, for example `{enable_thinking: false}`; needs `chat`."""
    system_prompt: str | None = None
    """System message before it; needs `chat`."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longer prompts are rejected, counted and named in a warning; the run goes on."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over a source that ends."""
    last_batch: Literal["train", "drop"] = "train"
    """What to do with the groups that do not fill a step when the data ends."""

    def single_sources(self) -> Iterator[tuple[str, SingleSource]]:
        """Every source that is no mixture, with its dotted key."""
        if isinstance(self.source, MixtureSource):
            for place, component in enumerate(self.source.sources):
                yield f"data.source.sources.{place}.source", component.source
        else:
            yield "data.source", self.source

"""Checks of `data` and `reward`: keys against each other, and the files that they name.

Invariant: nothing is read but names and sizes; `laminar/launch/check_data.py` looks into the files.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from laminar.config.data_schema import (
    FileSource,
    HuggingFaceSource,
    JsonlSource,
    ParquetSource,
    ReasoningGymSource,
    RowSource,
)
from laminar.config.reward_params import PARAMS, params_problems
from laminar.config.reward_schema import RewardPart
from laminar.config.schema import ExperimentConfig
from laminar.config.user_function import DOTTED_PATH


def source_problems(config: ExperimentConfig) -> Iterator[str]:
    """What contradicts itself in `data.source` and the chat template."""
    data = config.data
    if not data.chat:
        for name in ("chat_template", "chat_template_params"):
            if getattr(data, name):
                yield f"data.{name}: set, but data.chat is false, so no template is applied; set data.chat=true or remove it"
    gyms = 0
    for key, source in data.single_sources():
        if isinstance(source, ReasoningGymSource):
            gyms += 1
        elif source.format != "fields":
            yield from (
                f"{key}.{name}: set, but {key}.format: {source.format} knows its columns; remove one of them"
                for name in ("prompt_field", "answer_field")
                if getattr(source, name) != FileSource.model_fields[name].default
            )
    if gyms > 1:
        yield "data.source.sources: reasoning_gym twice; put all its data sets into one source, which is a mixture itself"


def reward_problems(config: ExperimentConfig) -> Iterator[str]:
    """What contradicts itself in `reward`, or is no reward."""
    reward = config.reward
    if reward.parts and (reward.function is not None or reward.params):
        yield "reward.parts: set beside reward.function or reward.params; make that function one of the parts"
    labels = [part.label for part in reward.terms()]
    for place, part in enumerate(reward.terms()):
        key = f"reward.parts.{place}" if reward.parts else "reward"
        yield from _reward_function(config, key, part)
        if part.label in labels[:place]:
            yield f"{key}.name: {part.label}: another part has this name; give one of them a name of its own"
        if part.weight == 0:
            yield f"{key}.weight: 0; expected another number: a part without weight changes nothing"


def _reward_function(config: ExperimentConfig, key: str, part: RewardPart) -> Iterator[str]:
    function = part.function
    if function == "reasoning_gym" and not any(
        isinstance(source, ReasoningGymSource) for _, source in config.data.single_sources()
    ):
        others = ", ".join(name for name in PARAMS if name != "reasoning_gym")
        yield (
            f"{key}.function: reasoning_gym scores reasoning-gym's prompts only, but data.source.type is "
            f"{config.data.source.type}; use {others} or package.module:function"
        )
    if function in PARAMS:
        yield from params_problems(part, f"{key}.params")
    elif not DOTTED_PATH.fullmatch(function):
        near = difflib.get_close_matches(function, PARAMS, n=1)
        hint = f"did you mean {near[0]}?" if near else "a colon stands between module and function"
        yield f'{key}.function: "{function}"; expected {", ".join(PARAMS)} or package.module:function; {hint}'


def file_problems(config: ExperimentConfig) -> Iterator[str]:
    """Files and folders of data and rewards that are not there."""
    here = f"(working directory: {Path.cwd()})"
    for key, source in config.data.single_sources():
        if not isinstance(source, ReasoningGymSource):
            yield from _data_file(f"{key}.path", source, here)
    template = config.data.chat_template
    if template is not None and not Path(template).is_file():
        yield f"data.chat_template: {template}: no such file {here}; expected a file with a Jinja chat template"
    for place, part in enumerate(config.reward.terms()):
        key = f"reward.parts.{place}.params.path" if config.reward.parts else "reward.params.path"
        path = part.params.get("path") if part.function == "reward_model" else None
        if isinstance(path, str) and not (Path(path) / "config.json").is_file():
            yield f"{key}: {path}: no Hugging Face model there (config.json is missing) {here}"


def _data_file(key: str, source: RowSource, here: str) -> Iterator[str]:
    path = Path(source.path)
    match source:
        case JsonlSource():
            if not path.is_file():
                what = "is not a file" if path.exists() else "no such file"
                yield f"{key}: {path}: {what} {here}; expected a JSON Lines file of prompts"
            elif path.stat().st_size == 0:
                yield f"{key}: {path}: empty; expected a JSON object per line with the key {source.prompt_field!r}"
        case ParquetSource():
            if not path.exists():
                yield f"{key}: {path}: no such file or folder {here}; expected a Parquet file, or a folder of them"
        case HuggingFaceSource():
            if not path.is_dir():
                what = "is not a folder" if path.exists() else "no such folder"
                yield f"{key}: {path}: {what} {here}; expected a data set that save_to_disk wrote, or Parquet shards"

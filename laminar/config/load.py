"""From a YAML file and `--set` overrides to a checked `ExperimentConfig`, or to one message that names every mistake.

Invariant: nothing is guessed. Values are checked strictly ("16" is not a number, `true` is not 1), unknown keys are refused.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from laminar.config.describe import (
    all_keys,
    dotted,
    expected_text,
    field_at,
    meaning,
    section_types,
    sections_at,
    tag_of,
)
from laminar.config.overrides import apply_overrides
from laminar.config.problems import raise_problems
from laminar.config.schema import ExperimentConfig
from laminar.config.section import Section
from laminar.config.yaml_file import EXPERIMENT, FileKind, read_yaml

SHOWN_CHARACTERS = 80  # of a wrong value
_NAME = re.compile(r"`([^`]+)`")  # one of those that a value may be, as `expected_text` writes it

Root = TypeVar("Root", bound=Section)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read a config file, apply overrides of the form `a.b.c=value`, and validate the result.

    Says nothing about the machine or about keys that depend on each other: see `checks.py`.

    Raises:
        UserError: the file, an override or a value is wrong; one text with every mistake.
    """
    return load_section(ExperimentConfig, EXPERIMENT, path, overrides)


def load_section(root: type[Root], kind: FileKind, path: str | Path, overrides: Sequence[str] = ()) -> Root:
    """The same for a file of another kind, whose top level is the section `root`.

    Raises:
        UserError: as `load_config`.
    """
    data: dict[str, Any] = read_yaml(Path(path), kind)
    apply_overrides(data, overrides)
    try:
        # Through JSON, because pydantic's strict mode then takes a list for a tuple, and nothing else that is loose.
        return root.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        details = _deepest(error.errors(include_url=False, include_context=False), data)
        messages = [_message(detail, data, str(path), overrides, root) for detail in details]
        raise_problems(str(path), list(dict.fromkeys(messages)))
        raise  # not reached: a ValidationError has errors


def _deepest(details: Sequence[ErrorDetails], data: object) -> list[ErrorDetails]:
    """Without "is no text" of a section that could have been a text, where there are mistakes inside of the section."""
    paths = [_path(detail["loc"], data, absent=detail["type"] == "missing") for detail in details]
    return [
        detail
        for detail, path in zip(details, paths, strict=True)
        if not isinstance(detail["input"], Mapping)
        or detail["type"] == "missing"
        or not any(len(other) > len(path) and other[: len(path)] == path for other in paths)
    ]


def _message(detail: ErrorDetails, data: object, file: str, overrides: Sequence[str], root: type[Section]) -> str:
    """One mistake: the key, the value, what was expected, what to do."""
    path = _path(detail["loc"], data, absent=detail["type"] == "missing")
    if detail["type"] == "extra_forbidden":
        return f"{dotted(path)}: unknown key; {_nearest_key(path, data, root)}"
    found = field_at(path, data, root)
    value, missing = detail["input"], detail["type"] == "missing"
    if missing and isinstance(path[-1], int):  # a list that is too short: the list is the mistake
        path, missing = path[:-1], False
    key, expected, about = dotted(path), "a mapping", ""
    if found:
        field, depth = found
        expected = _with_article(expected_text(field, element=len(path) > depth))
        about = f" ({meaning(field).rstrip('.')})"
    if detail["type"].startswith("union_tag"):
        key, expected, about = f"{key}.type", _tags(path, data, root), ""
        missing = not isinstance(value, Mapping) or "type" not in value
        value = None if missing else value["type"]
    if missing:
        return f"{key}: missing; expected {expected}{about}. Add it to {file}, or use --set {key}=..."
    shown = json.dumps(value, ensure_ascii=False)
    if len(shown) > SHOWN_CHARACTERS:
        shown = shown[:SHOWN_CHARACTERS] + "..."
    cause = next((text for text in reversed(overrides) if _sets(text, key)), None)
    place = f"the override --set {cause}" if cause else file
    names = [] if "section" in expected else _NAME.findall(expected)
    near = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{key}: {shown}; expected {expected}{hint} Change it in {place}"


def _with_article(text: str) -> str:
    if text.startswith(("number", "list", "mapping", "section")):
        return f"a {text}"
    return f"an {text}" if text.startswith("integer") else text


def _path(location: Sequence[str | int], data: object, *, absent: bool) -> list[str | int]:
    """Pydantic's location without what is no key of the file (tags of unions, types that were tried); `absent`: its last is none."""
    path: list[str | int] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(data, Mapping) and ((last and absent) or part in data):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part] if part < len(data) else None
        else:
            continue
        path.append(part)
    return path


def _nearest_key(path: Sequence[str | int], data: object, root: type[Section]) -> str:
    """Hint for an unknown key: the nearest one beside it, the same name elsewhere, or what the section has."""
    name = str(path[-1])
    known = [key for section in sections_at(path[:-1], data, root) for key in section.model_fields]
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {dotted([*path[:-1], near[0]])}?"
    # Of a tagged union it is another member's key, wherever that union is used.
    place = dotted(path).split(".")[-2:]
    if elsewhere := [k for k in all_keys(root) if k.rpartition(".")[2] == name and k.split(".")[-2:] != place]:
        return f"did you mean {elsewhere[0]}?"
    where = dotted(path[:-1]) or "the top level"
    return f"{where} has the keys {', '.join(dict.fromkeys(known))}"


def _tags(path: Sequence[str | int], data: object, root: type[Section]) -> str:
    found = field_at(path, data, root)
    return " or ".join(f"`{tag}`" for tag in _tag_names(found[0].annotation if found else None))


def _tag_names(annotation: object) -> Iterator[str]:
    for section in section_types(annotation):
        if tag := tag_of(section):
            yield tag


def _sets(override: str, key: str) -> bool:
    """Whether an override wrote this key, or a section around it."""
    written = override.partition("=")[0].strip()
    return key == written or key.startswith(f"{written}.")


def to_yaml(config: Section) -> str:
    """The resolved config as YAML, in the schema's order; loads back to an equal config."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return text

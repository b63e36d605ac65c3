"""YAML as configuration files use it: safe tags only, no key twice, `1e-4` is a number, dates stay text.

Everything read here can be written as JSON, which is what the schema then checks strictly.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from laminar.errors import UserError


@dataclass(kw_only=True, slots=True, frozen=True)
class FileKind:
    """What a file should hold, in the words of an error message."""

    what: str
    folder: str  # with examples
    example: str  # the shortest
    keys: str  # some of the top level


EXPERIMENT = FileKind(
    what="an experiment config",
    folder="configs/",
    example="configs/quickstart.yaml",
    keys="name, model, data, trainer",
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the three differences named above."""


# YAML 1.1, which PyYAML reads, wants a point in `1.0e-4` and takes 2024-01-01 for a date. Own table: SafeLoader's is shared.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    loader.flatten_mapping(node)
    result: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key)
        if key in result:
            raise yaml.constructor.ConstructorError(
                problem=f"key {key!r} is there twice in one section; keep one of them", problem_mark=key_node.start_mark
            )
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_value(text: str) -> Any:
    """The value of an override. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path, kind: FileKind = EXPERIMENT) -> dict[str, Any]:
    """The mapping that a configuration file holds.

    Raises:
        UserError: the file is missing, unreadable, not YAML, empty, or not a mapping; names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {kind.what} in YAML (examples: {kind.folder})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a YAML file") from None
    try:
        data = parse_value(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}{yaml_problem(error)}") from None
    if data is None:
        raise UserError(f"{path}: empty; expected {kind.what} (the shortest example: {kind.example})")
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {_kind(data)}; expected a mapping with the keys {kind.keys}, ...")
    return data


def yaml_problem(error: yaml.YAMLError) -> str:
    """`:line:column: what is wrong`, to be put after the file's name."""
    mark = getattr(error, "problem_mark", None)
    place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    return f"{place}: not valid YAML: {', '.join(part for part in parts if part) or error}"


def _kind(data: object) -> str:
    return "list" if isinstance(data, list) else "single value"

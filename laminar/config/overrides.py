"""`--set a.b.c=value`: overrides by dotted key, applied to the raw data before it is validated.

Invariant: an override changes exactly the key that it names; sections on the way are created, list elements are not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from laminar.config.yaml_file import parse_value, yaml_problem
from laminar.errors import UserError


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides in order, in place; the value after `=` is read as YAML, a number in the key is a list index.

    Raises:
        UserError: an override that is not `key=value`, whose value is not YAML, or whose key leads through a plain value.
    """
    for text in overrides:
        key, equals, value_text = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise UserError(f"--set {text}: expected KEY=VALUE with a dotted key, for example --set trainer.steps=10")
        try:
            value = parse_value(value_text)
        except yaml.YAMLError as error:
            raise UserError(f"--set {text}: the value{yaml_problem(error)}; quote it for YAML") from None
        _assign(data, parts, value, text)


def _assign(data: dict[str, Any], parts: Sequence[str], value: Any, text: str) -> None:
    container: Any = data
    for position, part in enumerate(parts):
        here = ".".join(parts[:position])
        last = position == len(parts) - 1
        if isinstance(container, list):
            index = _index(container, part, here, text)
            if last:
                container[index] = value
            container = container[index]
        elif isinstance(container, dict):
            if last:
                container[part] = value
            elif container.get(part) is None:
                container[part] = {}
            container = container[part]
        else:
            shown = json.dumps(container, ensure_ascii=False)
            raise UserError(f"--set {text}: {here} is {shown}, which has no key {part!r}; set {here} itself")


def _index(container: list[Any], part: str, here: str, text: str) -> int:
    if part.isascii() and part.isdigit() and int(part) < len(container):
        return int(part)
    raise UserError(
        f"--set {text}: {here} is a list of {len(container)}, so after it comes an index from 0 to {len(container) - 1}, "
        f"not {part!r}; to change its length set {here} as a whole"
    )

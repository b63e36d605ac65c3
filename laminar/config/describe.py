"""What the schema says about a key, in words. Error messages and `docs/configuration.md` both take it from here.

Invariant: nothing is written down twice; every word comes from the annotations and docstrings of `schema.py`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from laminar.config.schema import ExperimentConfig
from laminar.config.section import Section

Path = Sequence[str | int]  # keys and list indices from the root to a value

_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false"}
_PLURAL = {"integer": "integers", "number": "numbers", "text": "texts", "true or false": "booleans"}


def dotted(path: Path) -> str:
    """`("data", "source", "datasets", 0, "name")` as `data.source.datasets.0.name`."""
    return ".".join(str(part) for part in path)


def expected_text(field: FieldInfo, *, element: bool = False) -> str:
    """Type and range of a field, for example `integer, at least 1`; or of the elements of its list or mapping."""
    annotation = field.annotation
    if typing.get_origin(annotation) in (Union, types.UnionType):  # a list or mapping, or null
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    if element and (arguments := typing.get_args(annotation)):
        return _describe(arguments[-1] if typing.get_origin(annotation) is dict else arguments[0])
    return _describe(field.annotation, field.metadata)


def default_text(field: FieldInfo) -> str | None:
    """The default as YAML in one line; None for a required key, and for a section, whose keys have their own."""
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=False)
    if isinstance(value, Section):
        return None
    if isinstance(value, tuple):
        value = list(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def meaning(field: FieldInfo) -> str:
    """The docstring under the field, in one line."""
    return " ".join((field.description or "").split())


def section_types(annotation: Any) -> list[type[Section]]:
    """The sections that a value of this annotation is, or is a list of; several for a tagged union, else none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if typing.get_origin(annotation) in (Union, types.UnionType, list, Annotated):
        return [found for part in typing.get_args(annotation) for found in section_types(part)]
    return []


def tag_of(section: type[Section]) -> str | None:
    """Value of `type` that selects this member of a tagged union."""
    field = section.model_fields.get("type")
    if field is None or typing.get_origin(field.annotation) is not Literal:
        return None
    return str(typing.get_args(field.annotation)[0])


def sections_at(path: Path, data: object, root: type[Section] = ExperimentConfig) -> list[type[Section]]:
    """The sections that may hold the keys at `path`; `data`, the whole configuration, decides between tagged ones."""
    found: list[type[Section]] = [root]
    for part in path:
        data = _child(data, part)
        if isinstance(part, int):
            continue
        found = [
            section
            for parent in found
            if part in parent.model_fields
            for section in section_types(parent.model_fields[part].annotation)
        ]
        if len(found) > 1 and isinstance(data, Mapping):
            found = [section for section in found if tag_of(section) == data.get("type")] or found
    return found


def field_at(path: Path, data: object, root: type[Section] = ExperimentConfig) -> tuple[FieldInfo, int] | None:
    """The field of a key, or of the nearest key above it (an entry of a free mapping, an element of a list), and how
    many parts of the path lead to it.
    """
    for end in range(len(path), 0, -1):
        name = path[end - 1]
        if not isinstance(name, str):
            continue
        for section in sections_at(path[: end - 1], data, root):
            if name in section.model_fields:
                return section.model_fields[name], end
    return None


def all_keys(root: type[Section] = ExperimentConfig) -> Iterator[str]:
    """Every dotted key of the schema; elements of lists are left out."""
    yield from _keys(root, "")


def _keys(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if typing.get_origin(field.annotation) is not list:
            for inner in section_types(field.annotation):
                yield from _keys(inner, f"{prefix}{name}.")


def _child(data: object, part: str | int) -> object:
    if isinstance(data, Mapping):
        return data.get(part)
    if isinstance(data, list) and isinstance(part, int) and part < len(data):
        return data[part]
    return None


def _describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], arguments[1:])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        nullable = type(None) in arguments
        members = [part for part in arguments if part is not type(None)]
        text = _describe(members[0], metadata) if len(members) == 1 else _union(members) + _range(metadata)
        return f"{text}, or null" if nullable else text
    if origin is list:
        element = _describe(arguments[0])
        if section_types(arguments[0]) and " or " in element:
            return f"list{_range(metadata)}, each {element}"
        return "list of " + _plural(element) + _range(metadata)
    if origin is tuple:
        return f"list of {len(arguments)} {_plural(_describe(arguments[0]))}"
    if origin is dict:
        return f"mapping of names to {_plural(_describe(arguments[1]))}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section with the keys " + ", ".join(f"`{name}`" for name in annotation.model_fields)
    return _PLAIN.get(annotation, str(annotation)) + _range(metadata)


def _union(members: Sequence[Any]) -> str:
    tags = [tag for member in members for section in section_types(member) if (tag := tag_of(section))]
    if len(tags) == len(members):
        return "section whose `type` is " + " or ".join(f"`{tag}`" for tag in tags)
    return " or ".join(dict.fromkeys(_describe(member) for member in members))


def _plural(text: str) -> str:
    head, comma, rest = text.partition(",")
    if head.startswith("section "):
        return "sections " + text.removeprefix("section ")
    return _PLURAL.get(head, head) + (f"{comma} each{rest}" if comma else "")


def _range(metadata: Sequence[Any]) -> str:
    words: list[str] = []
    for limit in _limits(metadata):
        if isinstance(limit, annotated_types.Ge):
            words.append(f"at least {limit.ge}")
        elif isinstance(limit, annotated_types.Gt):
            words.append(f"above {limit.gt}")
        elif isinstance(limit, annotated_types.Le):
            words.append(f"at most {limit.le}")
        elif isinstance(limit, annotated_types.Lt):
            words.append(f"below {limit.lt}")
        elif isinstance(limit, annotated_types.MinLen):
            words.append(f"at least {limit.min_length} of them")
        elif pattern := getattr(limit, "pattern", None):
            words.append(f"matching `{pattern}`")
    return f", {' and '.join(words)}" if words else ""


def _limits(metadata: Sequence[Any]) -> Iterator[Any]:
    """The single limits; inside a nested `Annotated` they are still packed in a `FieldInfo`."""
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item

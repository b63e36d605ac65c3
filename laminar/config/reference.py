"""The configuration reference, made from the schema: `python -m laminar.config.reference > docs/configuration.md`."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator

from laminar.config.describe import default_text, expected_text, meaning, section_types, tag_of
from laminar.config.reward_params import PARAMS
from laminar.config.schema import ExperimentConfig
from laminar.config.section import Section

INTRODUCTION = """\
# Configuration

<!-- Made from laminar/config/schema.py by `python -m laminar.config.reference`; change the schema, not this file. -->

A configuration is a YAML file. `laminar config check FILE` checks it, `laminar config show FILE` prints it with every
default filled in, and `--set a.b.c=value` overrides a key of either command and of `laminar train` (the value is read as
YAML; list elements are named by their index, as in `--set data.source.datasets.0.weight=2`). Unknown keys, wrong types and
values out of range are refused before anything starts. A dash in the column Default means that the key is required.
"""


def reference() -> str:
    """The whole page as Markdown."""
    return "\n".join([INTRODUCTION, *tables(ExperimentConfig), *_reward_params()])


def _reward_params() -> Iterator[str]:
    """The options of each built-in reward that has some."""
    for function, section in PARAMS.items():
        if section.model_fields:
            yield _table(f"reward.params, reward.parts.N.params (`function: {function}`)", "", section)


def tables(root: type[Section]) -> list[str]:
    """A Markdown table for the top level, and one for every section below it."""
    return [
        _table("Top level", "", root),
        *(_table(title, prefix, section) for title, prefix, section in _sections(root, "", set())),
    ]


def _sections(
    parent: type[Section], prefix: str, tagged: set[type[Section]]
) -> Iterator[tuple[str, str, type[Section]]]:
    """Every section below `parent`, depth first, with its heading and the prefix of its keys.

    Members of a tagged union come once (`tagged` holds those that have come): a source is the same alone and in a mixture.
    """
    for name, field in parent.model_fields.items():
        is_list = typing.get_origin(field.annotation) is list
        inner_prefix = f"{prefix}{name}.{'N.' if is_list else ''}"
        for section in section_types(field.annotation):
            tag = tag_of(section)
            if section in tagged:
                continue
            if tag:
                tagged.add(section)
            title = inner_prefix.removesuffix(".") + (f" (`type: {tag}`)" if tag else "")
            yield title, inner_prefix, section
            yield from _sections(section, inner_prefix, tagged)


def _table(title: str, prefix: str, section: type[Section]) -> str:
    lines = [f"## {title}", "", " ".join((section.__doc__ or "").split()), ""]
    lines += ["| key | type and range | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in section.model_fields.items():
        inner = section_types(field.annotation)
        kind = expected_text(field)
        is_list = typing.get_origin(field.annotation) is list
        if len(inner) == 1 and not is_list and set(typing.get_args(field.annotation)) <= {inner[0], type(None)}:
            kind = "section" if field.annotation is inner[0] else "section, or null"
        default = default_text(field)
        absent = "-" if field.is_required() else "all defaults"
        shown = absent if default is None else f"`{default}`"
        text = meaning(field) or " ".join((inner[0].__doc__ or "").split() if inner else ())
        cells = (f"`{prefix}{name}`", kind, shown, text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())

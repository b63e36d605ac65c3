"""The reference of a study's config: `python -m laminar.simulation.study.config_reference > docs/simulation-configuration.md`."""

from __future__ import annotations

import sys

from laminar.config.reference import tables
from laminar.simulation.study.config import SimulationConfig

INTRODUCTION = """\
# Configuration of a study

<!-- Made from laminar/simulation/study/config.py by `python -m laminar.simulation.study.config_reference`; change that, not this file. -->

What `laminar simulate FILE` takes; `--set a.b.c=value` overrides a key. `docs/simulation.md` says how to ask a question.
Unknown keys, wrong types, values out of range and cases that cannot be are refused before anything runs. A dash in the column
Default means that the key is required.
"""


def reference() -> str:
    """The whole page as Markdown."""
    return "\n".join([INTRODUCTION, *tables(SimulationConfig)])


if __name__ == "__main__":
    sys.stdout.write(reference())

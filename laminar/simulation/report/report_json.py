"""A study's result as JSON, and back; what was written is read again unchanged.

The document is an object:

| key | what |
| --- | --- |
| `format` | 1; grows when a key changes its meaning or goes |
| `name`, `description` | of the study |
| `assumptions` | list of `name`, `value`, `unit`, `source` |
| `cases` | list of `model`, `gpus`, `rollout_gpus`, `trainer_gpus`, `tensor_parallel`, `relays`, `workload`, `schedule`, `repack`, and `record` |
| `paper` | list of `key`, `what`, `paper`, `unit`, `claim` ("equal", "at_most", "at_least"), `source`, `ours` (null: not run), `of`, `ratio`, `differs`, `explanation`; derived from the cases, and not read back |

A `record` has the fields of `record.RunRecord` under their names: seconds end in `_s`, fractions are 0 to 1, keys of
`staleness` are numbers as strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from laminar.errors import UserError
from laminar.simulation.study.paper_figures import Comparison, compare
from laminar.simulation.study.study_result import StudyResult

FORMAT = 1


def to_json(result: StudyResult, explanations: Mapping[str, str]) -> str:
    """The document, with a line end; the same result gives the same text."""
    document = {
        "format": FORMAT,
        **msgspec.to_builtins(result, str_keys=True),
        "paper": [_comparison(one) for one in compare(result, explanations)],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=0).decode() + "\n"


def write_json(result: StudyResult, path: Path, explanations: Mapping[str, str]) -> None:
    """Write the document; `OSError` if that cannot be done."""
    path.write_text(to_json(result, explanations), encoding="utf-8")


def read_json(path: Path) -> StudyResult:
    """The result that `write_json` wrote.

    Raises:
        UserError: the file cannot be read, is no JSON, or not a study's result of this format.
    """
    remedy = "give a file that `laminar simulate --json` wrote"
    try:
        document = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: is not JSON ({error}); {remedy}") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise UserError(f"{path}: format is {found!r}, expected {FORMAT}; {remedy}")
    try:
        return msgspec.convert(document, StudyResult, str_keys=True)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: is not a study's result ({error}); {remedy}") from error


def _comparison(one: Comparison) -> dict[str, Any]:
    figure = one.figure
    return {
        "key": figure.key,
        "what": figure.what,
        "paper": figure.value,
        "unit": figure.unit,
        "claim": figure.claim,
        "source": figure.source,
        "ours": one.ours.value if one.ours else None,
        "of": one.ours.of if one.ours else figure.not_simulated,
        "ratio": one.ratio,
        "differs": one.differs,
        "explanation": one.explanation,
    }

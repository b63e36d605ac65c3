"""Options of the built-in rewards (`reward.params`), and their check.

Invariant: the keys of `PARAMS` are the names of all built-in rewards; nothing else lists them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from laminar.config.describe import expected_text, meaning
from laminar.config.reward_schema import RewardPart
from laminar.config.section import Section


class ReasoningGymParams(Section):
    """The score of the reasoning-gym generator that made the prompt."""


class ExactParams(Section):
    """1 if the response is the answer, white space aside."""


class NumericParams(Section):
    """1 if the response's last number equals the answer's last number."""


class MathVerifyParams(Section):
    """1 if the response's last mathematical expression equals the answer (math-verify): LaTeX, fractions, sets, intervals, equations."""

    boxed_only: bool = False
    """Look only at what stands in `\\boxed{}`; a response without it scores 0."""


class RegexParams(Section):
    """1 if the pattern is found; with a group named `answer`, if what the last match has there is the answer, white space aside."""

    pattern: str
    """Regular expression of Python's `re`; `.` matches line ends, too."""
    match: Literal["search", "full"] = "search"
    """`search`: anywhere in the response; `full`: the response as a whole."""


class CodeParams(Section):
    """The program in the response (its last fenced block) passes the tests of its prompt, in the sandbox (`docs/sandbox.md`)."""

    tests_field: str = "tests"
    """Column of the tests: statements such as `assert add(2, 3) == 5` (text or a list), or inputs and outputs; `answer`: the answer holds them."""
    partial: bool = False
    """Score the share of tests passed; else 1 for all of them and 0 for less."""
    time_s: Annotated[float, Field(gt=0)] = 5.0
    """Wall-clock time of one test, in seconds; `timeout_s` bounds all tests of a response together, and beyond it the score is 0."""
    memory_mib: Annotated[int, Field(ge=32)] = 512
    """Memory of one test, in MiB."""


class RewardModelParams(Section):
    """Score of a Hugging Face sequence classifier, several trajectories per forward pass."""

    path: str
    """Folder of the model with its tokenizer; relative to the working directory."""
    label: int | str | None = None
    """Class whose probability is the score, by index or by name; null: the model has one output, and that is the score."""
    sigmoid: bool = False
    """One output: map it to 0 to 1."""
    max_batch: Annotated[int, Field(ge=1)] = 16
    """Trajectories in one forward pass at most; `reward.calls_per_worker` bounds it, too."""
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    """Longer texts lose their beginning."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision."""
    device: str = "auto"
    """Torch's name of the device; `auto`: the first GPU if there is one, else the CPU."""
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of a forward pass."""


class LengthPenaltyParams(Section):
    """0 for a response of at most `free_tokens`, from there linearly down to -1 at `max_tokens`. (`algorithm.overlong` is DAPO's, for the last tokens before the limit.)"""

    free_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that cost nothing."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Length that costs -1, as any longer one; `rollout.max_response_tokens` if not given."""


PARAMS: dict[str, type[Section]] = {
    "reasoning_gym": ReasoningGymParams,
    "exact": ExactParams,
    "numeric": NumericParams,
    "math_verify": MathVerifyParams,
    "regex": RegexParams,
    "code": CodeParams,
    "reward_model": RewardModelParams,
    "length_penalty": LengthPenaltyParams,
}

NEEDS_ANSWER = ("exact", "numeric", "math_verify")


def read_params(part: RewardPart) -> Section:
    """The options of a part whose function is built in.

    Raises:
        ValidationError: `params_problems` names what is wrong.
    """
    return PARAMS[part.function].model_validate_json(json.dumps(part.params), strict=True)


def params_problems(part: RewardPart, key: str) -> Iterator[str]:
    """What is wrong with the options of a built-in; `key` is where they stand."""
    schema = PARAMS[part.function]
    try:
        read_params(part)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        for detail in sorted(details, key=lambda detail: detail["type"] != "extra_forbidden"):
            name = str(detail["loc"][0])
            if detail["type"] == "extra_forbidden":
                near = difflib.get_close_matches(name, schema.model_fields, n=1)
                known = f"did you mean {near[0]}?" if near else f"it has: {', '.join(schema.model_fields) or 'none'}"
                yield f"{key}.{name}: {part.function} has no such option; {known}"
                continue
            field = schema.model_fields[name]
            if detail["type"] == "missing":
                yield f"{key}.{name}: missing; {part.function} needs it: {expected_text(field)} ({meaning(field).rstrip('.')})"
            else:
                yield f"{key}.{name}: {json.dumps(part.params[name])}; expected {expected_text(field)}"

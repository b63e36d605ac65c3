"""What can be said against `data` and `reward` before anything starts.

Invariant: nothing here imports torch or runs user code; reasoning-gym and math-verify are imported only where they are used.
"""

from __future__ import annotations

import difflib

from laminar.config.data_schema import FileSource, ReasoningGymSource
from laminar.config.held_out import held_out, in_its_words
from laminar.config.reward_params import NEEDS_ANSWER
from laminar.config.reward_schema import RewardPart
from laminar.config.schema import ExperimentConfig
from laminar.data.open_source import open_rows, open_source, source_names
from laminar.data.reasoning_gym_source import ReasoningGymPrompts
from laminar.data.row_source import RowPrompts
from laminar.data.source import Entry
from laminar.data.tokenize import render_prompt
from laminar.errors import UserError
from laminar.rewards.code_reward import find_tests, read_tests
from laminar.rewards.numeric import last_number
from laminar.rewards.registry import check_reward

LOOKED_AT = 20_000  # rows of a source; of a larger one so many, evenly spread
PARSED = 200  # answers that are given to math-verify, which takes milliseconds for each


def check_held_out(config: ExperimentConfig) -> None:
    """`check_source` of what is evaluated, if anything is.

    Raises:
        UserError: the first thing that is wrong.
    """
    if config.evaluation is None:
        return
    try:
        check_source(held_out(config))
    except UserError as error:
        raise UserError(in_its_words(str(error))) from error


def check_source(config: ExperimentConfig) -> None:
    """Read the rows of every file, or make the first entry of every generator; fill in the template; look the rewards up.

    Raises:
        UserError: the first thing that is wrong.
    """
    check_reward(config)
    _check_part_sources(config)
    for key, source in config.data.single_sources():
        if isinstance(source, ReasoningGymSource):
            prompts = ReasoningGymPrompts(source, config.seed, key)
            for place in range(len(source.datasets)):
                render_prompt(config.data.prompt_template, prompts.component_entry(place, 0))
        else:
            _check_rows(config, source, key)
    if open_source(config).size is None and config.data.epochs > 1:
        raise UserError(
            f"data.epochs: {config.data.epochs}, but the generators never end; set data.source.prompts to the number of "
            "prompts in an epoch"
        )


def _check_part_sources(config: ExperimentConfig) -> None:
    """Parts of the reward name sources that there are, and each source has a part."""
    known = list(source_names(config))
    parts = config.reward.parts
    for place, part in enumerate(parts):
        for name in part.sources or ():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
                raise UserError(f"reward.parts.{place}.sources: no source is called {name!r}; {hint}")
    if not parts or any(part.sources is None for part in parts):
        return
    for name in known:
        if not any(name in (part.sources or ()) for part in parts):
            raise UserError(f"reward.parts: none of them is for the source {name!r} (reward.parts.*.sources)")


def _check_rows(config: ExperimentConfig, source: FileSource, key: str) -> None:
    rows = open_rows(source, key)  # type: ignore[arg-type]
    prompts = RowPrompts(source, rows, seed=config.seed, key=key)
    try:
        step = max(1, len(rows) // LOOKED_AT)
        for count, index in enumerate(range(0, len(rows), step)):
            _check_entry(config, source, key, rows.where(index), prompts.row_entry(index), parse=count < PARSED)
    finally:
        rows.close()


def _check_entry(
    config: ExperimentConfig, source: FileSource, key: str, where: str, entry: Entry, *, parse: bool
) -> None:
    """Template and, for the built-in rewards, the answer of one row."""
    try:
        render_prompt(config.data.prompt_template, entry)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if entry.history and not config.data.chat:
        raise UserError(
            f"{where}: data.chat is false, but the prompt is a conversation of {len(entry.history) + 1} messages; set it to "
            "true, or keep only the user's question"
        )
    for part in config.reward.terms():
        if part.sources is None or entry.source in part.sources:
            _check_answer(part, source, key, where, entry, parse=parse)


def _check_answer(part: RewardPart, source: FileSource, key: str, where: str, entry: Entry, *, parse: bool) -> None:
    function = part.function
    if function in NEEDS_ANSWER and not entry.answer.strip():
        columns = ", ".join(entry.metadata) or "none"
        raise UserError(
            f"{where}: reward.function {function} needs an answer, but the key {source.answer_field!r} is missing or "
            f"empty; the other keys are: {columns}. Set {key}.answer_field to the answer's"
        )
    if function == "numeric" and last_number(entry.answer) is None:
        raise UserError(
            f"{where}: reward.function numeric needs a number in the answer, got {entry.answer[:80]!r}; use exact for text"
        )
    if function == "code":
        try:
            read_tests(find_tests(str(part.params.get("tests_field", "tests")), entry.answer, entry.metadata))
        except ValueError as error:
            raise UserError(
                f"{where}: reward.function code: {error}. Set its params.tests_field to the tests'"
            ) from error
    if function == "math_verify" and parse:
        from laminar.rewards.math_verify_reward import parse_answer

        if not parse_answer(entry.answer):
            raise UserError(
                f"{where}: reward.function math_verify finds no mathematical expression in the answer {entry.answer[:80]!r}; "
                "use exact for text"
            )

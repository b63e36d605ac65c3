"""What can be said against `data` and `reward.function` before anything starts.

Invariant: nothing here imports torch or runs user code; reasoning-gym is imported only for a reasoning-gym source.
"""

from __future__ import annotations

from laminar.config.schema import ExperimentConfig, JsonlSource
from laminar.data.jsonl_source import JsonlPrompts
from laminar.data.reasoning_gym_source import ReasoningGymPrompts
from laminar.data.source import Entry
from laminar.data.tokenize import render_prompt
from laminar.errors import UserError
from laminar.rewards.numeric import last_number
from laminar.rewards.registry import check_reward


def check_source(config: ExperimentConfig) -> None:
    """Read the whole file, or make the first entry of every generator; fill in the template; look the reward up.

    Raises:
        UserError: the first thing that is wrong.
    """
    check_reward(config)
    source = config.data.source
    if isinstance(source, JsonlSource):
        JsonlPrompts(source, config.seed, check=lambda where, entry: _check_line(config, where, entry)).close()
        return
    if source.prompts is None and config.data.epochs > 1:
        raise UserError(
            f"data.epochs: {config.data.epochs}, but the generators never end; set data.source.prompts to the number of "
            "prompts in an epoch"
        )
    prompts = ReasoningGymPrompts(source, config.seed)
    for place in range(len(source.datasets)):
        render_prompt(config.data.prompt_template, prompts.component_entry(place, 0))


def _check_line(config: ExperimentConfig, where: str, entry: Entry) -> None:
    """Template and, for the built-in rewards, the answer of one line."""
    try:
        render_prompt(config.data.prompt_template, entry)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    source, function = config.data.source, config.reward.function
    assert isinstance(source, JsonlSource)
    if function in ("exact", "numeric") and not entry.answer.strip():
        keys = ", ".join(entry.metadata) or "none"
        raise UserError(
            f"{where}: reward.function {function} needs an answer, but the key {source.answer_field!r} is missing or "
            f"empty; the other keys are: {keys}. Set data.source.answer_field to the answer's"
        )
    if function == "numeric" and last_number(entry.answer) is None:
        raise UserError(
            f"{where}: reward.function numeric needs a number in the answer, got {entry.answer[:80]!r}; use exact for text"
        )

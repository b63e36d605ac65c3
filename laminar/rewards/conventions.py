"""How a reward function is called: with our own argument names, or with those of verl's or TRL's functions.

Invariant: a function is called by keyword only, with exactly the arguments that it declares; which convention it follows is
decided once, from its parameters, and a parameter that nobody could fill is an error at start.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from laminar.errors import UserError


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardInput:
    """What a reward may look at."""

    trajectory_id: str
    prompt: str  # the prompt's text, before template and chat template
    response: str  # what the model wrote, without special tokens
    answer: str  # expected answer; "" where there is none
    metadata: dict[str, Any]
    source: str  # data set that the prompt came from
    num_tokens: int  # of the response


ARGUMENTS = ("prompt", "response", "answer", "metadata", "source", "num_tokens")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")  # compute_score(data_source, solution_str, ...)
TRL = ("prompts", "completions")  # reward(prompts, completions, **columns) -> one number for each completion

Fill = Callable[[RewardInput], dict[str, Any]]


def bind(key: str, name: str, function: Any, params: Mapping[str, Any]) -> Fill:
    """How to fill a function's parameters from a `RewardInput`.

    Args:
        key: of the configuration that names the function.
        name: the function's, for messages.
        function: plain or async.
        params: options that the configuration gives it.

    Raises:
        UserError: it is not callable, needs an argument that there is not, or does not take an option.
    """
    if not callable(function):
        raise UserError(f"{key}: {name} is {type(function).__name__}, not a function")
    try:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    except (ValueError, TypeError):  # a function written in C tells nothing; let it have everything
        return lambda given: {**_own(given), **params}
    declared = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.kind is not p.POSITIONAL_ONLY]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    _check_params(key, name, declared, takes_all, params)
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    needed = [parameter for parameter in required if parameter not in params]
    if "completions" in declared:
        return _trl(declared, takes_all, params)
    if "solution_str" in declared or "ground_truth" in declared:
        _check_needed(key, name, needed, VERL, declared)
        return lambda given: {**_some(_verl(given), declared, takes_all), **params}
    _check_needed(key, name, needed, ARGUMENTS, declared)
    return lambda given: {**_some(_own(given), declared, takes_all), **params}


def _check_needed(key: str, name: str, needed: list[str], offered: tuple[str, ...], declared: list[str]) -> None:
    for parameter in needed:
        if parameter not in offered or parameter not in declared:  # positional-only ones are not declared
            raise UserError(
                f"{key}: {name} needs {parameter!r}, but rewards are called by keyword with {', '.join(offered)} (those that "
                "the function declares), and with reward.params"
            )


def _check_params(key: str, name: str, declared: list[str], takes_all: bool, params: Mapping[str, Any]) -> None:
    place = f"{key.removesuffix('.function')}.params"
    for option in params:
        if option in (*ARGUMENTS, *VERL, *TRL):
            raise UserError(f"{place}.{option}: rewards get this with every trajectory; give the option another name")
        if option not in declared and not takes_all:
            near = difflib.get_close_matches(option, declared, n=1)
            hint = f"did you mean {near[0]}?" if near else f"its parameters are: {', '.join(declared) or 'none'}"
            raise UserError(f"{place}.{option}: {name} takes no such argument; {hint}")


def _some(given: dict[str, Any], declared: list[str], takes_all: bool) -> dict[str, Any]:
    return given if takes_all else {name: given[name] for name in declared if name in given}


def _own(given: RewardInput) -> dict[str, Any]:
    return {argument: getattr(given, argument) for argument in ARGUMENTS}


def _verl(given: RewardInput) -> dict[str, Any]:
    return {
        "data_source": given.metadata.get("data_source", given.source),
        "solution_str": given.response,
        "ground_truth": given.answer,
        "extra_info": given.metadata.get("extra_info", given.metadata),
    }


def _trl(declared: list[str], takes_all: bool, params: Mapping[str, Any]) -> Fill:
    """Lists of one: TRL's functions judge a batch, and here every trajectory is scored on its own."""

    def fill(given: RewardInput) -> dict[str, Any]:
        columns = {**given.metadata, "answer": given.answer, "source": given.source}
        lists = {name: [value] for name, value in columns.items()}
        lists |= {"prompts": [given.prompt], "completions": [given.response]}
        return {**_some(lists, declared, takes_all), **params}

    return fill

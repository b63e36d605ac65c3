"""From the section `reward` to its parts: built-in names, or dotted paths to the user's own functions.

Invariant: only `load_parts` runs user code, and only environment workers call it. `check_reward` finds the same
faults by reading the source, so that the controller can refuse a config without running anything of the user's.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from laminar.config.data_schema import ReasoningGymSource
from laminar.config.reward_params import PARAMS, params_problems
from laminar.config.reward_schema import RewardPart
from laminar.config.schema import ExperimentConfig
from laminar.config.user_function import DOTTED_PATH, check_function, load_function
from laminar.errors import UserError
from laminar.rewards.built_in import ASYNC, ZERO_OVERTIME, load_built_in
from laminar.rewards.reward import Reward


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadedPart:
    """A part of the reward, ready to be called."""

    reward: Reward
    in_loop: bool  # a coroutine function: many calls at once in the worker; else one call at a time in a process


def keyed_parts(config: ExperimentConfig) -> Iterator[tuple[str, RewardPart]]:
    """Every part with the dotted key of the section that holds its `function` and `params`."""
    parts = config.reward.terms()
    for place, part in enumerate(parts):
        yield f"reward.parts.{place}" if config.reward.parts else "reward", part


def overtime_is_zero(part: RewardPart) -> bool:
    """Whether a response on which this part exceeds its limit scores 0, instead of having no reward."""
    return part.function in ZERO_OVERTIME


def load_parts(config: ExperimentConfig, only: Collection[int] | None = None) -> dict[int, LoadedPart]:
    """The parts of an experiment's reward by place; imports the user's modules from the working directory or the environment.

    Args:
        config: the experiment.
        only: places of those to load; None: all but the built-ins that run in the worker itself.

    Raises:
        UserError: a name or path is wrong, a module cannot be imported, or a function does not fit.
    """
    loaded: dict[int, LoadedPart] = {}
    for place, (key, part) in enumerate(keyed_parts(config)):
        built_in_loop = part.function in ASYNC
        if (only is None and built_in_loop) or (only is not None and place not in only):
            continue
        reward = load_reward(config, key, part)
        loaded[place] = LoadedPart(reward=reward, in_loop=built_in_loop or reward.is_async)
    return loaded


def load_reward(config: ExperimentConfig, key: str, part: RewardPart) -> Reward:
    """One part; `key` is its place in the configuration.

    Raises:
        UserError: as `load_parts`.
    """
    function_key = f"{key}.function"
    if is_built_in(config, key, part):
        return Reward(part.label, load_built_in(config, part, key), key=function_key)
    function = load_function(function_key, part.function)
    return Reward(part.label, function, params=part.params, key=function_key)


def check_reward(config: ExperimentConfig) -> None:
    """Refuse a reward that cannot work, without importing the user's modules.

    Raises:
        UserError: wrong name or option, no such module, a syntax error in it, or no such function in it.
    """
    for key, part in keyed_parts(config):
        if not is_built_in(config, key, part):
            check_function(f"{key}.function", part.function)
        elif part.function not in ("reasoning_gym", *ASYNC):  # the source's own check makes the generators
            load_built_in(config, part, key)


def is_built_in(config: ExperimentConfig, key: str, part: RewardPart) -> bool:
    """Whether a part is a built-in, and not a dotted path.

    Raises:
        UserError: neither of the two, a built-in that does not fit the source, or options that it does not have.
    """
    function = part.function
    sources = [source for _, source in config.data.single_sources()]
    if function == "reasoning_gym" and not any(isinstance(source, ReasoningGymSource) for source in sources):
        others = ", ".join(name for name in PARAMS if name != "reasoning_gym")
        raise UserError(
            f"{key}.function: reasoning_gym scores only prompts of its own generators, but data.source.type is "
            f"{config.data.source.type}; set it to {others} or package.module:function"
        )
    if function in PARAMS:
        for problem in params_problems(part, f"{key}.params"):
            raise UserError(problem)
        return True
    if DOTTED_PATH.fullmatch(function):
        return False
    near = difflib.get_close_matches(function, PARAMS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if ":" not in function and "." in function:
        path, _, last = function.removesuffix(".py").rpartition(".")
        hint = f"; the function's name comes after a colon: {path}:{last}" if path else hint
    raise UserError(
        f"{key}.function: {function!r} is neither {', '.join(PARAMS)} nor a dotted path package.module:function{hint}"
    )

"""From the section `environment` to objects that answer turns: built-in names, or a dotted path to the user's own class.

Invariant: only `load_environment` runs user code, and only environment workers call it. `check_environment` finds the same faults
by reading the source, so that the controller can refuse a config without running anything of the user's.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from laminar.config.environment_schema import SINGLE_TURN, EnvironmentConfig, SandboxConfig
from laminar.config.user_function import DOTTED_PATH, check_function, load_function
from laminar.environments.environment import Environment, Score
from laminar.environments.python_tool import CODE_END, PythonTool
from laminar.environments.reasoning_gym_retry import ReasoningGymRetry
from laminar.environments.sandbox import SandboxLimits
from laminar.errors import UserError

KEY = "environment.name"
BUILT_IN: dict[str, Callable[..., Any]] = {"python_tool": PythonTool, "reasoning_gym_retry": ReasoningGymRetry}
METHODS = ("reset", "step", "close")
GIVEN = ("sandbox", "score")  # arguments that we give to those who have a parameter of the name

MakeEnvironment = Callable[[], Environment]


def check_environment(config: EnvironmentConfig) -> None:
    """Refuse what cannot work, without importing the user's module.

    Raises:
        UserError: unknown name, no such module or class, or params that a built-in environment does not have.
    """
    _check_params_of_single_turn(config)
    if config.name == SINGLE_TURN:
        return
    if config.name in BUILT_IN:
        _check_arguments(config, BUILT_IN[config.name])
    else:
        _check_path(config.name)
        check_function(KEY, config.name, "class")


def load_environment(config: EnvironmentConfig, score: Score) -> MakeEnvironment:
    """What makes an environment for each trajectory; imports the user's module from the working directory or the environment.

    Raises:
        UserError: as `check_environment`; or the module cannot be imported, or the class lacks a method or takes other params.
    """
    made = BUILT_IN.get(config.name)
    if made is None:
        _check_path(config.name)
        made = load_function(KEY, config.name, "class")
    missing = [name for name in METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise UserError(
            f"{KEY}: {config.name} has no method {missing[0]!r}; an environment has {', '.join(METHODS)} (docs/environments.md)"
        )
    arguments = _check_arguments(config, made)
    given = {"sandbox": sandbox_limits(config.sandbox), "score": score}
    arguments |= {name: given[name] for name in _parameters(made) if name in given}
    return lambda: made(**arguments)


def sandbox_limits(config: SandboxConfig) -> SandboxLimits:
    """The config's limits as the sandbox takes them."""
    return SandboxLimits(
        time_s=config.time_s,
        memory_bytes=config.memory_mib << 20,
        processes=config.processes,
        output_bytes=config.output_kib << 10,
        scratch_bytes=config.scratch_mib << 20,
    )


def stop_texts(config: EnvironmentConfig) -> Sequence[str]:
    """Texts that end a turn."""
    if config.stop is not None:
        return config.stop
    if config.name == "python_tool":
        return [str(config.params.get("code_end", CODE_END))]
    return []


def _check_params_of_single_turn(config: EnvironmentConfig) -> None:
    if config.name == SINGLE_TURN and (config.params or config.stop):
        key = "params" if config.params else "stop"
        raise UserError(
            f"environment.{key}: set, but {KEY} is {SINGLE_TURN}, which has no use for it; name the environment, or remove it"
        )


def _parameters(made: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(made).parameters)
    except (TypeError, ValueError):  # written in C: it tells nothing
        return {}


def _check_arguments(config: EnvironmentConfig, made: Callable[..., Any]) -> dict[str, Any]:
    """`params`, if the class takes them all and needs no others."""
    parameters = _parameters(made)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = [
        name
        for name, parameter in parameters.items()
        if name not in GIVEN and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    for name in config.params:
        if name not in names and not takes_all:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"environment.params.{name}: {config.name} has no such parameter; {hint}there are: {', '.join(names) or 'none'}"
            )
    for name in names:
        if parameters[name].default is inspect.Parameter.empty and name not in config.params:
            raise UserError(f"environment.params: {config.name} needs {name!r}; set environment.params.{name}")
    return dict(config.params)


def _check_path(name: str) -> None:
    if DOTTED_PATH.fullmatch(name):
        return
    names = [SINGLE_TURN, *BUILT_IN]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"{KEY}: {name!r}; expected {', '.join(names)} or package.module:Class{hint}")

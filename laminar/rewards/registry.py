"""From `reward.function` to a reward: a built-in name, or a dotted path to the user's own function.

Invariant: only `load_reward` runs user code, and only environment workers call it. `check_reward` finds the same
faults by reading the source, so that the controller can refuse a config without running anything of the user's.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from pathlib import Path

from laminar.config.schema import ExperimentConfig, ReasoningGymSource
from laminar.errors import UserError
from laminar.rewards.exact import exact_reward
from laminar.rewards.numeric import numeric_reward
from laminar.rewards.reward import Reward, in_one_line

KEY = "reward.function"
BUILT_IN = ("reasoning_gym", "exact", "numeric")


def load_reward(config: ExperimentConfig) -> Reward:
    """The reward of an experiment; imports the user's module from the working directory or the environment.

    Raises:
        UserError: the name or the path is wrong, the module cannot be imported, or the function does not fit.
    """
    function = config.reward.function
    module_name, name = split_path(config)
    if not name:
        if function == "exact":
            return Reward(function, exact_reward)
        if function == "numeric":
            return Reward(function, numeric_reward)
        from laminar.rewards.reasoning_gym_reward import ReasoningGymReward

        assert isinstance(config.data.source, ReasoningGymSource)  # split_path has checked it
        return Reward(function, ReasoningGymReward(config.data.source))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a module may raise anything while it is imported, sys.exit() included
        raise UserError(f"{KEY}: {function}: importing {module_name} failed: {in_one_line(error)}") from error
    try:
        found = attrgetter(name)(module)
    except AttributeError as error:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise no_such_function(function, module_name, name, functions) from error
    return Reward(function, found)


def check_reward(config: ExperimentConfig) -> None:
    """Refuse a reward that cannot work, without importing the user's module.

    Raises:
        UserError: wrong name, no such module, a syntax error in it, or no such function in it.
    """
    function = config.reward.function
    module_name, name = split_path(config)
    if not name:
        return
    spec = find_module(function, module_name)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # compiled modules are judged when they are imported
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), filename=spec.origin)
    except SyntaxError as error:
        raise UserError(f"{KEY}: {function}: {spec.origin}:{error.lineno}: {error.msg}") from error
    names = bound_names(tree)
    if names is not None and name.partition(".")[0] not in names:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        raise no_such_function(function, module_name, name, functions)


def split_path(config: ExperimentConfig) -> tuple[str, str]:
    """(module, function) of a dotted path; ("", "") for a built-in.

    Raises:
        UserError: neither of the two, or a built-in that does not fit the source.
    """
    function = config.reward.function
    if function == "reasoning_gym" and not isinstance(config.data.source, ReasoningGymSource):
        raise UserError(
            f"{KEY}: reasoning_gym scores only prompts of its own generators, but data.source.type is "
            f"{config.data.source.type}; set it to exact, numeric or package.module:function"
        )
    if function in BUILT_IN:
        return "", ""
    module_name, _, name = function.partition(":")
    if all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        return module_name, name
    near = difflib.get_close_matches(function, BUILT_IN, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if ":" not in function and "." in function:
        path, _, last = function.removesuffix(".py").rpartition(".")
        hint = f"; the function's name comes after a colon: {path}:{last}" if path else hint
    raise UserError(
        f"{KEY}: {function!r} is neither {', '.join(BUILT_IN)} nor a dotted path package.module:function{hint}"
    )


def find_module(function: str, module_name: str) -> ModuleSpec:
    """Where a module lies, looked for in the working directory first; nothing is imported, not even its packages."""
    paths = [os.getcwd(), *sys.path]
    place = f"the working directory ({os.getcwd()}) or in the Python environment"
    *packages, last = module_name.split(".")
    for depth, package in enumerate(packages, start=1):
        spec = PathFinder.find_spec(".".join(packages[:depth]), paths)
        if spec is None or spec.submodule_search_locations is None:
            raise UserError(f"{KEY}: {function}: there is no package {package} in {place}")
        paths = list(spec.submodule_search_locations)
        place = f"{'.'.join(packages[:depth])} ({', '.join(paths)})"
    found = PathFinder.find_spec(module_name, paths)
    if found is None:
        raise UserError(f"{KEY}: {function}: there is no module {last} in {place}")
    return found


def bound_names(tree: ast.Module) -> set[str] | None:
    """Names that a module may bind (nested ones too: it is for the import to judge those); None where reading cannot
    tell (a star import, a module `__getattr__`, exec).
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.ImportFrom() | ast.Import():
                names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            case ast.Call(func=ast.Name(id="exec" | "globals")):
                return None
    return None if names & {"*", "__getattr__"} else names


def no_such_function(function: str, module_name: str, name: str, there: list[str]) -> UserError:
    """The error for a module without the function."""
    near = difflib.get_close_matches(name, there, n=3) or sorted(there)[:10]
    return UserError(
        f"{KEY}: {function}: {module_name} has no {name!r}; its functions are: {', '.join(near) or 'none'}"
    )

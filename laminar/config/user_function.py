"""A user's own function or class, named in a config by a dotted path `package.module:function`.

Invariant: only `load_function` runs user code. `check_function` finds the same faults by reading the source, so that the
controller can refuse a config without running anything of the user's. Modules are looked for in the working directory first.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from laminar.errors import UserError

DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
PLURAL = {"function": "functions", "class": "classes"}
MAX_MESSAGE = 300  # characters of an exception's message that are passed on


Kind = Literal["function", "class"]


def check_function(key: str, path: str, kind: Kind = "function") -> None:
    """Refuse a function that cannot be there, without importing its module.

    Args:
        key: of the config, for messages.
        path: a dotted path (it matches DOTTED_PATH).
        kind: what is expected, for messages.

    Raises:
        UserError: no such module, a syntax error in it, or no such function in it.
    """
    module_name, _, name = path.partition(":")
    spec = _find_module(key, path, module_name)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # compiled modules are judged when they are imported
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), filename=spec.origin)
    except SyntaxError as error:
        raise UserError(f"{key}: {path}: {spec.origin}:{error.lineno}: {error.msg}") from error
    names = _bound_names(tree)
    if names is not None and name.partition(".")[0] not in names:
        nodes = ast.ClassDef if kind == "class" else ast.FunctionDef | ast.AsyncFunctionDef
        raise _no_such_function(key, path, kind, [node.name for node in tree.body if isinstance(node, nodes)])


def load_function(key: str, path: str, kind: Kind = "function") -> Callable[..., Any]:
    """The function, or the class; imports its module.

    Raises:
        UserError: the module cannot be imported, or has no such function.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise UserError(f"{key}: {path}: importing {module_name} failed: {in_one_line(error)}") from error
    try:
        found = attrgetter(name)(module)
    except AttributeError as error:
        fits = inspect.isclass if kind == "class" else inspect.isfunction
        raise _no_such_function(
            key, path, kind, [name for name, value in vars(module).items() if fits(value)]
        ) from error
    if not callable(found) or (kind == "class" and not inspect.isclass(found)):
        raise UserError(f"{key}: {path}: is no {kind} but {type(found).__name__}; name a {kind}")
    function: Callable[..., Any] = found
    return function


def in_one_line(error: BaseException) -> str:
    """An exception's kind and message, and the line of code that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + '...'}{place}"


def _find_module(key: str, path: str, module_name: str) -> ModuleSpec:
    """Where a module lies; nothing is imported, not even its packages."""
    paths = [os.getcwd(), *sys.path]
    place = f"the working directory ({os.getcwd()}) or in the Python environment"
    *packages, last = module_name.split(".")
    for depth, package in enumerate(packages, start=1):
        spec = PathFinder.find_spec(".".join(packages[:depth]), paths)
        if spec is None or spec.submodule_search_locations is None:
            raise UserError(f"{key}: {path}: there is no package {package} in {place}")
        paths = list(spec.submodule_search_locations)
        place = f"{'.'.join(packages[:depth])} ({', '.join(paths)})"
    found = PathFinder.find_spec(module_name, paths)
    if found is None:
        raise UserError(f"{key}: {path}: there is no module {last} in {place}")
    return found


def _bound_names(tree: ast.Module) -> set[str] | None:
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


def _no_such_function(key: str, path: str, kind: Kind, there: Sequence[str]) -> UserError:
    module_name, _, name = path.partition(":")
    near = difflib.get_close_matches(name, there, n=3) or sorted(there)[:10]
    return UserError(
        f"{key}: {path}: {module_name} has no {name!r}; its {PLURAL[kind]} are: {', '.join(near) or 'none'}"
    )

"""A user's class by its dotted path: looked up in the source without running it, or imported.

Invariant: `find_class` runs nothing of the user's.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import sys
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path
from typing import Any

from laminar.errors import UserError


def find_class(key: str, path: str, expected: str) -> None:
    """Look whether a dotted path leads to a class.

    Args:
        key: of the config, for messages.
        path: `package.module:Class`.
        expected: what the key may hold, for messages.

    Raises:
        UserError: not a dotted path, no such module, a syntax error in it, or nothing of the name in it.
    """
    module_name, name = _split(key, path, expected)
    places = [os.getcwd(), *sys.path]
    where = f"the working directory ({os.getcwd()}) or the Python environment"
    *packages, last = module_name.split(".")
    for depth, package in enumerate(packages, start=1):
        spec = PathFinder.find_spec(".".join(packages[:depth]), places)
        if spec is None or spec.submodule_search_locations is None:
            raise UserError(f"{key}: {path}: there is no package {package} in {where}")
        places = list(spec.submodule_search_locations)
        where = ".".join(packages[:depth])
    found = PathFinder.find_spec(module_name, places)
    if found is None:
        raise UserError(f"{key}: {path}: there is no module {last} in {where}")
    if found.origin is None or not found.origin.endswith(".py"):
        return  # compiled modules are judged when they are imported
    try:
        tree = ast.parse(Path(found.origin).read_bytes(), filename=found.origin)
    except SyntaxError as error:
        raise UserError(f"{key}: {path}: {found.origin}:{error.lineno}: {error.msg}") from error
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            bound.add(node.name)
    if name.partition(".")[0] not in {*classes, *bound} and not {"*", "__getattr__"} & bound:
        raise _no_such_class(key, path, name, classes)


def load_class(key: str, path: str, expected: str) -> type[Any]:
    """Import a class, from the working directory or the environment.

    Raises:
        UserError: not a dotted path, the import fails, or there is no class of the name.
    """
    module_name, name = _split(key, path, expected)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a module may raise anything while it is imported, sys.exit() included
        raise UserError(f"{key}: {path}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    try:
        found = attrgetter(name)(module)
    except AttributeError as error:
        classes = [label for label, value in vars(module).items() if isinstance(value, type)]
        raise _no_such_class(key, path, name, classes) from error
    if not isinstance(found, type):
        raise UserError(f"{key}: {path}: {name} is {type(found).__name__}, not a class")
    return found


def _split(key: str, path: str, expected: str) -> tuple[str, str]:
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise UserError(f"{key}: {path!r}; expected {expected}")
    return module_name, name


def _no_such_class(key: str, path: str, name: str, there: list[str]) -> UserError:
    near = difflib.get_close_matches(name, there, n=3) or sorted(there)[:10]
    return UserError(f"{key}: {path}: there is no {name!r} in it; its classes are: {', '.join(near) or 'none'}")

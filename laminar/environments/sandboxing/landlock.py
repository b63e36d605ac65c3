"""Landlock: a process gives up all files but some, for itself and its children. It needs no privilege (Linux 5.13)."""

from __future__ import annotations

import ctypes
import os
import struct

from laminar.environments.sandboxing import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1  # flag of create_ruleset: say which version the kernel has
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_ALL_OF_FIRST_VERSION = (1 << 13) - 1
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


def landlock_version() -> int:
    """The kernel's version of Landlock, 0 if there is none."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    except OSError:
        return 0


def confine_files(*, readable: tuple[str, ...], writable: tuple[str, ...]) -> bool:
    """Give up all files but these and what is below them; False where the kernel has no Landlock.

    Paths that do not exist are passed over. The process must have given up new privileges.

    Raises:
        OSError: the kernel refuses.
    """
    version = landlock_version()
    if not version:
        return False
    handled = _ALL_OF_FIRST_VERSION | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    rules = ctypes.c_uint64(handled)
    ruleset = kernel.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(8), ctypes.c_uint(0))
    try:
        for path in readable:
            _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in writable:
            _allow(ruleset, path, handled & ~_EXECUTE)
        kernel.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            access &= _OF_FILES
        rule = struct.pack("<Qi", access, place)
        kernel.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
    finally:
        os.close(place)

"""A run as text: a line per event of the controller, per message, per fault; the same bytes for the same seed.

Invariant: nothing of the process shows (no addresses, no hashes, no order of sets); numbers are printed to the microsecond.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np

from laminar.protocol.messages import Heartbeat, Welcome
from laminar.trajectory import Group, Prompt, Trajectory

KEPT_LINES = 40  # for the report of a violation
LONGEST_TEXT = 160  # characters of one value


class EventLog:
    """Lines, and a digest of all of them."""

    def __init__(self, *, keep_all: bool = False) -> None:
        """`keep_all`: else only the last lines are kept; the digest is of all lines in either case."""
        self.lines: deque[str] = deque(maxlen=None if keep_all else KEPT_LINES)
        self.count = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def event(self, now: float, event: object) -> None:
        """An event of the controller's bus."""
        self._add(now, f"event    {describe(event)}")

    def message(self, now: float, route: str, message: object) -> None:
        """A delivery; heartbeats are left out."""
        if isinstance(message, Heartbeat):
            return
        text = "Welcome" if isinstance(message, Welcome) else describe(message)
        self._add(now, f"message  {route}: {text}")

    def fault(self, now: float, text: str) -> None:
        """A fault strikes, or ends."""
        self._add(now, f"fault    {text}")

    def note(self, now: float, text: str) -> None:
        """How the run ended."""
        self._add(now, f"run      {text}")

    @property
    def digest(self) -> str:
        """Of all lines so far, as hexadecimal text."""
        return self._digest.hexdigest()

    def text(self) -> str:
        """The lines that were kept."""
        return "\n".join(self.lines)

    def _add(self, now: float, text: str) -> None:
        line = f"{now:12.6f}  {text}"
        self.lines.append(line)
        self.count += 1
        self._digest.update(line.encode())
        self._digest.update(b"\n")


def describe(value: object) -> str:
    """A dataclass as its name and fields, on one line."""
    parts = [f"{field.name}={_value(getattr(value, field.name))}" for field in fields(value)]  # type: ignore[arg-type]
    return " ".join([type(value).__name__, *parts])


def _value(value: object) -> str:
    if isinstance(value, str):
        # Paths differ from machine to machine: the last part says enough.
        text = value.rpartition("/")[2] if value.startswith("/") else value
        return repr(text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "...")
    if isinstance(value, bool | int) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, Trajectory):
        return f"{value.trajectory_id}(lease {value.lease}, {value.state.value}, {value.num_tokens} tokens, v{value.policy_version})"
    if isinstance(value, Group):
        return f"group {value.group_id}(v{value.policy_version}, {value.num_tokens} tokens)"
    if isinstance(value, Prompt):
        return f"prompt {value.prompt_id}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if is_dataclass(value):
        return f"({describe(value)})"
    return type(value).__name__


def _array(array: np.ndarray) -> str:
    """Short ones as they are; of long ones the shape, both ends and the sum."""
    if array.size <= 8:
        return "[" + " ".join(f"{item:g}" for item in array.ravel().tolist()) + "]"
    flat = array.ravel()
    return f"{array.dtype}[{'x'.join(map(str, array.shape))}]({flat[0]:g}..{flat[-1]:g}, sum {float(flat.sum(dtype=np.float64)):g})"

"""What an environment is: it answers the turns of one trajectory.

An environment of your own is a class with these methods; docs/environments.md has an example. One object serves one
trajectory. Invariant: it may be made anew at any time and led through the turns that there were (`reset`, then `step` with each
of them), because its worker was lost or the trajectory went to another; so the same turns should lead to the same state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(kw_only=True, slots=True, frozen=True)
class EnvironmentPrompt:
    """The prompt of the trajectory, as the data has it."""

    text: str  # before template and chat template
    answer: str  # expected answer; "" where there is none
    metadata: dict[str, Any]
    source: str  # data set that it came from


@dataclass(kw_only=True, slots=True, frozen=True)
class Step:
    """The answer to one turn."""

    observation: str = ""  # what the model reads before its next turn
    as_message: bool = False  # under `data.chat`: a user message of its own; else it goes on with what the model wrote
    reward: float = 0.0  # added to what the reward function gives for the last turn
    done: bool = False  # no further turn; the observation is not read by anybody


class Environment(Protocol):
    """Answers the turns of one trajectory; the methods may also be plain functions."""

    async def reset(self, prompt: EnvironmentPrompt) -> str | None:
        """Begin. A text that is returned is read by the model behind the question; the same for the same prompt."""
        ...

    async def step(self, response: str) -> Step:
        """Answer a turn: what the model wrote since the observation before, special tokens included but for its last."""
        ...

    async def close(self) -> None:
        """The trajectory has ended, or goes on elsewhere: let go of what is held."""
        ...


Score = Callable[[EnvironmentPrompt, str], Awaitable[float]]
"""The run's reward of a response; environments whose `__init__` has a parameter `score` get it."""

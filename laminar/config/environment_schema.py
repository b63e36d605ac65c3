"""The section `environment`: what answers the model at the end of each of its turns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Section

SINGLE_TURN = "single_turn"


class SandboxConfig(Section):
    """What one run of the model's code may use."""

    time_s: Annotated[float, Field(gt=0)] = 5.0
    """Wall-clock time, in seconds."""
    memory_mib: Annotated[int, Field(ge=32)] = 512
    """Memory of all its processes together, and address space of each, in MiB."""
    processes: Annotated[int, Field(ge=1)] = 16
    """Processes, threads included."""
    output_kib: Annotated[int, Field(ge=1)] = 64
    """What is kept of standard output, and of standard error, in KiB; code that prints more is ended."""
    scratch_mib: Annotated[int, Field(ge=1)] = 16
    """Files that it may write, in MiB."""


class EnvironmentConfig(Section):
    """What happens when the model ends a turn: nothing (`single_turn`), or an observation and another turn."""

    name: str = SINGLE_TURN
    """`single_turn`, `python_tool` (code between markers is run, its output comes back), `reasoning_gym_retry` (a wrong answer gets another try), or a dotted path `package.module:Class`."""
    max_turns: Annotated[int, Field(ge=1)] = 4
    """Turns of the model in one trajectory; after the last it ends with finish reason `turns`."""
    max_observation_tokens: Annotated[int, Field(ge=1)] = 256
    """Longer observations lose their middle. `rollout.max_response_tokens` counts all turns and observations of a trajectory."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest time that the environment may take over one turn, in seconds."""
    retries: Annotated[int, Field(ge=0)] = 1
    """How often a turn is given to the environment again after it failed, took too long, or its worker was lost."""
    on_error: Literal["drop", "fail"] = "drop"
    """When the retries are used up: drop the trajectory's group, counted and with a warning, or stop the run."""
    stop: list[str] | None = None
    """Texts that end a turn beside the end-of-sequence token; null takes the environment's own (`python_tool`: the end marker of code)."""
    params: dict[str, int | float | str | bool] = {}
    """Arguments of the environment, handed on as they are; docs/environments.md lists those of the built-in ones."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits of `python_tool`, and of environments of your own that run code in the sandbox."""

    @property
    def multi_turn(self) -> bool:
        """Whether turns end in calls of an environment at all."""
        return self.name != SINGLE_TURN

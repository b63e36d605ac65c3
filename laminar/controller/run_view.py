"""What the REPL may look at and do: the parts of a running controller, by their own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from laminar.config.schema import ExperimentConfig
from laminar.controller.evaluator import Evaluator
from laminar.controller.experience_buffer import ExperienceBuffer
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.prompt_pool import PromptPool
from laminar.controller.relay_manager import RelayManager
from laminar.controller.repacker import Repacker
from laminar.controller.rollout_fleet import RolloutFleet
from laminar.controller.rollout_manager import RolloutManager
from laminar.controller.run_control import RunControl
from laminar.controller.trainer_driver import TrainerDriver
from laminar.controller.worker_registry import WorkerRegistry
from laminar.observability.events import EventBus
from laminar.trajectory import Trajectory


class RunView(Protocol):
    """Implemented by `Controller`; by a few hand-made parts under test."""

    @property
    def config(self) -> ExperimentConfig: ...

    @property
    def run_dir(self) -> Path: ...

    @property
    def events(self) -> EventBus: ...

    @property
    def registry(self) -> WorkerRegistry: ...

    @property
    def relays(self) -> RelayManager: ...

    @property
    def rollouts(self) -> RolloutManager: ...

    @property
    def fleet(self) -> RolloutFleet: ...

    @property
    def repacker(self) -> Repacker: ...

    @property
    def evaluator(self) -> Evaluator: ...

    @property
    def trainer(self) -> TrainerDriver: ...

    @property
    def buffer(self) -> ExperienceBuffer: ...

    @property
    def pool(self) -> PartialResponsePool: ...

    @property
    def prompts(self) -> PromptPool: ...

    @property
    def control(self) -> RunControl: ...

    @property
    def history(self) -> Mapping[str, Trajectory]:
        """Trajectories by id in the order of their start, the consumed ones included; the oldest are forgotten."""
        ...

    @property
    def now(self) -> Callable[[], float]:
        """The controller's clock, in seconds."""
        ...

    @property
    def started_at(self) -> float:
        """Start of the run on that clock."""
        ...

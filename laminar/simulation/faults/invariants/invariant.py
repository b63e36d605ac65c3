"""What the checks share: what they look at, how they are called, and how they fail.

Invariant: a check looks and never changes anything, so a run with checks is the run without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from laminar.config.schema import ExperimentConfig
from laminar.controller.controller import Controller
from laminar.controller.journal.restore import Restored
from laminar.controller.schedules.make_schedule import max_staleness
from laminar.simulation.cluster import SimulatedRun
from laminar.simulation.models.workload import Workload


class InvariantViolation(Exception):
    """A promise was broken. The message has the invariant's name, the values, the virtual time, and what happened last."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


@dataclass(kw_only=True, slots=True, frozen=True)
class Observed:
    """A run as the checks see it."""

    made: SimulatedRun
    workload: Workload
    prompts: int | None  # the data ends after so many positions
    violations: list[InvariantViolation] = field(default_factory=list)  # in order; only the first says something

    @property
    def controller(self) -> Controller:
        """The one that lives now."""
        return self.made.controller

    @property
    def config(self) -> ExperimentConfig:
        """The experiment."""
        return self.controller.config

    @property
    def max_staleness(self) -> int | None:
        """The bound of this run; None: none."""
        return max_staleness(self.controller.config)


class Invariant:
    """Base of the checks. All methods may raise InvariantViolation; none waits."""

    name: ClassVar[str]

    def __init__(self, run: Observed) -> None:
        self.run = run

    @property
    def controller(self) -> Controller:
        """The one that lives now."""
        return self.run.controller

    def watch(self, controller: Controller) -> None:
        """Called for each controller of the run before it starts, to look at calls of its parts."""

    def taken_up(self, restored: Restored) -> None:
        """Another controller goes on from this state. What the one before had not written down by then has not happened; what
        it had told a worker, or had written long ago, has."""

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """By type of event: called at every event of this type, in the middle of what the controller does."""
        return {}

    def message_handlers(self) -> dict[type, Callable[[str, bool, Any], None]]:
        """By type of message: called with the peer ("rollout-0#1"), whether the message goes to it, and the message, when it is
        delivered, before it is handled."""
        return {}

    def recount(self) -> None:
        """Called when nothing of the controller's is half-way: after every burst of events, and at the end."""

    def at_end(self) -> None:
        """Called when the run has ended, well or not."""

    def fail(self, text: str) -> NoReturn:
        """Raise the violation, and keep it: whoever is being checked might swallow it."""
        violation = InvariantViolation(self.name, text)
        self.run.violations.append(violation)
        raise violation

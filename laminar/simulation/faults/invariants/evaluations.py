"""Evaluation stays apart from training, and is of one version.

None of its trajectories is in the experience buffer or in a step; together they take no more than their share of places
while there is training; a finished evaluation has each response to each of its prompts once, all of the version that it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.observability.events import (
    EvaluationFinished,
    EvaluationResponses,
    EvaluationStarted,
    GroupCompleted,
    RolloutLost,
    StepFinished,
)
from laminar.simulation.faults.invariants.invariant import Invariant, Observed


class EvaluationStaysApart(Invariant):
    """See the module's text."""

    name = "evaluation stays apart from training and is of one version"

    def __init__(self, run: Observed) -> None:
        super().__init__(run)
        self._version_of: dict[int, int] = {}  # by evaluation
        self._responses: EvaluationResponses | None = None
        self._most_rollouts = 0  # there at once, since none had an evaluation's trajectories

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """See `Invariant`."""
        return {
            EvaluationStarted: self._on_started,
            EvaluationResponses: self._on_responses,
            EvaluationFinished: self._on_finished,
            GroupCompleted: lambda event: self._check_groups([event.group]),
            StepFinished: lambda event: self._check_groups(event.groups),
            RolloutLost: self._on_lost,
        }

    def _on_lost(self, event: RolloutLost) -> None:
        self._most_rollouts = max(self._most_rollouts, len(self.controller.rollouts.replicas) + 1)

    def _check_groups(self, groups: list[Any]) -> None:
        for group in groups:
            if any(trajectory.evaluation is not None for trajectory in group.trajectories):
                self.fail(f"group {group.group_id} holds trajectories of an evaluation")

    def _on_started(self, event: EvaluationStarted) -> None:
        if event.evaluation in self._version_of:
            self.fail(f"evaluation {event.evaluation} has started twice")
        self._version_of[event.evaluation] = event.policy_version

    def _on_responses(self, event: EvaluationResponses) -> None:
        self._responses = event

    def _on_finished(self, event: EvaluationFinished) -> None:
        result, config = event.result, self.run.config.evaluation
        assert config is not None and self._responses is not None
        responses = self._responses.responses
        expected = self._version_of.get(result.evaluation)
        odd = [response for response in responses if response.policy_version != expected]
        if odd or result.policy_version != expected:
            self.fail(f"evaluation {result.evaluation} of version {expected}: {result}; responses of others: {odd}")
        places = [(response.prompt_id, response.sample) for response in responses]
        wanted = config.prompts * config.samples
        if len(set(places)) != len(places) or len(places) + result.prompts_rejected * config.samples != wanted:
            self.fail(f"evaluation {result.evaluation} has responses to {places}, expected {wanted} of them")

    def recount(self) -> None:
        """See `Invariant`. Where rollouts were lost meanwhile, the share is of those that there were."""
        controller, config = self.controller, self.run.config
        running = controller.evaluator.running
        held = 0
        for replica in controller.rollouts.replicas.values():
            for trajectory in replica.in_flight.values():
                if trajectory.evaluation is None:
                    continue
                held += 1
                if running is None or trajectory.evaluation != running.number:
                    self.fail(f"{replica.name} generates {trajectory.trajectory_id}, of no evaluation that runs")
                if replica.policy_version != self._version_of[trajectory.evaluation]:
                    self.fail(
                        f"{replica.name} serves version {replica.policy_version} and generates {trajectory.trajectory_id} of "
                        f"version {self._version_of[trajectory.evaluation]}"
                    )
        rollouts = len(controller.rollouts.replicas)
        begun = running is not None and running.in_progress  # those that wait for the environment come back, too
        self._most_rollouts = max(self._most_rollouts, rollouts) if begun else rollouts
        if config.evaluation is None or controller.trainer.clock.state == "done":
            return  # after training it may have all of them
        most = max(1, int(config.evaluation.share * self._most_rollouts * config.rollout.max_running))
        if held > most:
            self.fail(f"rollouts hold {held} trajectories of evaluation; its share is {most}")

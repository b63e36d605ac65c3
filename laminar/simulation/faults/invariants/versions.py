"""No trajectory mixes versions (except under `partial`), none lacks a token or has one twice; versions only grow.

A modelled rollout writes the version that made a token into its token id, and the workload says how long a response is, and
where its turns end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.config.held_out import max_evaluation_tokens
from laminar.controller.journal.restore import Restored
from laminar.observability.events import StepFinished, StepStarted, TrajectoryFinished, WeightsPublished, WorkerJoined
from laminar.simulation.faults.invariants.invariant import Invariant, Observed
from laminar.simulation.models.turns import OBSERVATION_TOKEN, whole_response
from laminar.trajectory import Trajectory


class OneVersionEachTokenOnce(Invariant):
    """See the module's text."""

    name = "no trajectory mixes versions, no token is lost or doubled"

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """See `Invariant`."""
        return {TrajectoryFinished: self._on_finished, StepFinished: self._on_step}

    def _on_finished(self, event: TrajectoryFinished) -> None:
        self._check(event.trajectory)

    def _on_step(self, event: StepFinished) -> None:
        for group in event.groups:
            for trajectory in group.trajectories:
                self._check(trajectory)
            oldest = min(trajectory.policy_version or 0 for trajectory in group.trajectories)
            if group.policy_version is None or group.policy_version > oldest:
                self.fail(f"group {group.group_id} counts as version {group.policy_version}; a member is of {oldest}")

    def _check(self, trajectory: Trajectory) -> None:
        who = f"trajectory {trajectory.trajectory_id}"
        versions = trajectory.versions
        if not versions or versions[0] != (trajectory.policy_version, 0):
            self.fail(f"{who} of version {trajectory.policy_version} says {versions}")
        evaluated = trajectory.evaluation is not None
        if len(versions) > 1 and (evaluated or not self.controller.rollouts.schedule.interrupts):
            self.fail(f"{who} mixes versions: {versions}")
        token_ids = trajectory.response_token_ids()
        member = int(trajectory.trajectory_id.partition(".")[2])
        expected, observations = self._expected(trajectory.prompt.prompt_id, member, evaluated)
        if list(trajectory.observations()) != observations:
            self.fail(f"{who} has observations at {list(trajectory.observations())}; expected {observations}")
        for start, end in observations:
            if (token_ids[start:end] != OBSERVATION_TOKEN).any() or trajectory.response_logprobs()[start:end].any():
                self.fail(f"{who}: tokens {start} to {end} are not what the environment wrote")
        if len(token_ids) != expected or trajectory.num_tokens != expected:
            self.fail(
                f"{who} has {len(token_ids)} tokens (counted: {trajectory.num_tokens}); its response has {expected}"
            )
        if len(trajectory.response_logprobs()) != expected:
            self.fail(f"{who} has {expected} tokens and {len(trajectory.response_logprobs())} logprobs")
        ends = [start for _, start in versions[1:]] + [expected]
        for (version, start), end in zip(versions, ends, strict=True):
            made_by = set(token_ids[start:end].tolist()) - {OBSERVATION_TOKEN}
            if made_by - {version}:
                self.fail(
                    f"{who}: tokens {start} to {end} were made by versions {sorted(made_by)}, not by {version} alone"
                )

    def _expected(self, prompt_id: int, member: int, evaluated: bool) -> tuple[int, list[tuple[int, int]]]:
        """Tokens of the response, and where its observations are."""
        config, workload = self.run.config, self.run.workload
        max_tokens = max_evaluation_tokens(config) if evaluated else config.rollout.max_response_tokens
        if not config.environment.multi_turn:
            return min(workload.response_tokens(prompt_id, member), max_tokens), []
        return whole_response(
            workload, prompt_id, member, max_tokens=max_tokens, max_turns=config.environment.max_turns
        )


class VersionsGrow(Invariant):
    """`policy_version` only grows, and one version has one content."""

    name = "policy_version only grows"

    def __init__(self, run: Observed) -> None:
        super().__init__(run)
        self._newest = -1
        self._trained_since = False
        self._pid: int | None = None  # the trainer's

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """See `Invariant`."""
        return {WeightsPublished: self._on_published, StepStarted: self._on_started, WorkerJoined: self._on_joined}

    def _on_joined(self, event: WorkerJoined) -> None:
        """A trainer that was started anew holds the initial model, version 0, until it has loaded a checkpoint."""
        if event.worker == "trainer-0" and event.pid != self._pid:
            self._pid = event.pid
            if self._newest == 0:
                self._trained_since = False

    def taken_up(self, restored: Restored) -> None:
        """See `Invariant`."""
        if not restored.policy_version <= self._newest <= restored.issued:
            self.fail(f"published: {self._newest}; the journal: {restored.policy_version}, ordered {restored.issued}")
        self._newest, self._trained_since = restored.policy_version, False

    def _on_started(self, event: StepStarted) -> None:
        self._trained_since = True

    def _on_published(self, event: WeightsPublished) -> None:
        version = event.policy_version
        # The newest may be written into a new master relay's store once more, as long as the weights are the same.
        again = version == self._newest and not self._trained_since
        if version <= self._newest and not again:
            self.fail(f"version {version} is published after {self._newest} (trained since: {self._trained_since})")
        self._newest, self._trained_since = version, False

    def recount(self) -> None:
        """See `Invariant`."""
        trainer, relays = self.controller.trainer, self.controller.relays
        if trainer.policy_version != relays.published_version:
            self.fail(f"the trainer is at version {trainer.policy_version}, the relays at {relays.published_version}")
        for relay in relays.relays.values():
            held = relay.versions
            newest = max(trainer.policy_version, trainer._orders.issued)
            if held != sorted(set(held)) or len(held) > relay.keep or (held and held[-1] > newest):
                self.fail(f"relay-{relay.rank} is said to hold {held}; published: {trainer.policy_version}")

"""Evaluates held-out prompts while training goes on: when, on which rollouts, with which version.

  step finished, REPL --> [ due ] --> prompts --> [ evaluation ] --take--> rollout manager --> rollouts that are its hosts
  environment manager ---------------scored-----> [            ] --> EvaluationFinished

Invariants: every trajectory of an evaluation is of one version; together they never take more than `evaluation.share` of
the places of all rollouts while there is training; they enter neither the experience buffer nor the count of prompts. The
rollouts that generate them (as few as that share allows) stay with the version until nothing waits for it; all others
take new weights as always. A host that is lost costs what its last deltas lacked, or, if no other rollout serves the
version, the evaluation: it starts over with a newer one.
"""

from __future__ import annotations

import asyncio
import math

from laminar.config.schema import ExperimentConfig
from laminar.controller.evaluation import Evaluation
from laminar.controller.journal.restore import Restored
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.prompt_pool import Fetch, prompt_of
from laminar.controller.replica import Replica
from laminar.controller.rollout_fleet import RolloutFleet
from laminar.controller.run_control import RunControl
from laminar.errors import RunFailed, UserError
from laminar.evaluation_result import EvaluationResult, summarize
from laminar.observability.events import (
    EvaluationDue,
    EvaluationFinished,
    EvaluationResponses,
    EvaluationStarted,
    EvaluationStartedOver,
    EventBus,
    Notice,
    RolloutLost,
    StepFinished,
    TrainerRestarted,
    TrajectoryFailed,
    TrajectoryFinished,
    TrajectoryOrphaned,
    TrajectoryScored,
    WeightsPublished,
)
from laminar.protocol.messages import PromptRecord
from laminar.trajectory import Prompt, Trajectory

FETCHED_AT_ONCE = 64  # prompts

# Of a controller's evaluations: a rollout may still hold trajectories of an earlier controller's, whose names must be others.
NUMBERS_PER_LIFE = 1_000_000


class Evaluator:
    """One evaluation at a time, and at most one more that is due."""

    def __init__(
        self,
        events: EventBus,
        fleet: RolloutFleet,
        pool: PartialResponsePool,
        control: RunControl,
        config: ExperimentConfig,
        *,
        fetch: Fetch,
    ) -> None:
        """`fetch(start, count)` asks for held-out prompts."""
        self.results: list[EvaluationResult] = []
        self.running: Evaluation | None = None
        self._events = events
        self._fleet = fleet
        self._pool = pool
        self._control = control
        self._config = config.evaluation
        self._fetch = fetch
        self._max_running = config.rollout.max_running
        self._max_prompt_tokens = config.data.max_prompt_tokens
        self._share = config.evaluation.share if config.evaluation is not None else 0.0
        self._least_version: int | None = None  # of the evaluation that is due; None: none is
        self._number = 0  # of the newest
        self._rejected = 0
        self._step = 0  # that the trainer has made
        self._version = -1  # that it has published
        self._step_of: dict[int, int] = {}  # version -> step whose weights it is
        self._changed = asyncio.Event()  # something is due, has got further, or the user wants something
        self._now = asyncio.get_running_loop().time
        if config.evaluation is not None:
            events.subscribe(self._on_published, WeightsPublished)
            events.subscribe(self._on_step, StepFinished)
            events.subscribe(self._on_restarted, TrainerRestarted)
            events.subscribe(self._on_orphaned, TrajectoryOrphaned)
            events.subscribe(self._on_rollout_lost, RolloutLost)
            events.subscribe(self._on_finished, TrajectoryFinished, TrajectoryFailed)
            events.subscribe(self._on_scored, TrajectoryScored)
            control.on_change.append(self._changed.set)

    # ------------------------------------------------------------ when

    @property
    def enabled(self) -> bool:
        """Whether the experiment has held-out prompts."""
        return self._config is not None

    @property
    def busy(self) -> bool:
        """An evaluation runs or is due."""
        return self.running is not None or self._least_version is not None

    def ask(self, *, step: int | None = None) -> int:
        """Evaluate the newest version as soon as a rollout serves it; returns the version. One that is due is not made twice.

        `step`: whose weights these are, where no trainer tells.
        """
        assert self._config is not None
        if step is not None:
            self._step_of[max(0, self._version)] = step
        if self._least_version is not None:
            text = (
                f"the evaluation that was due from version {self._least_version} on is left out: another one still runs"
            )
            self._events.emit(Notice(level="warning", text=text))
        else:
            self._events.emit(EvaluationDue(least_version=max(0, self._version)))
        self._least_version = max(0, self._version)
        self._changed.set()
        return self._least_version

    def take_back(self, restored: Restored) -> None:
        """Where an earlier controller has left off: an evaluation that was due or under way is made anew."""
        if self._config is None:
            return
        self._number = restored.life * NUMBERS_PER_LIFE
        self._step, self._version = restored.step, restored.policy_version
        self._step_of[max(0, self._version)] = self._step
        if restored.evaluating:
            self.ask()

    def _on_published(self, event: WeightsPublished) -> None:
        first, self._version = self._version < 0, event.policy_version
        self._step_of[event.policy_version] = self._step  # one that a step ends with is put right in a moment
        if first and self._config is not None and self._config.at_start:
            self.ask()

    def _on_step(self, event: StepFinished) -> None:
        self._step = self._step_of[event.policy_version] = event.step
        assert self._config is not None
        if self._config.every and event.step % self._config.every == 0:
            self.ask()

    def _on_restarted(self, event: TrainerRestarted) -> None:
        self._step = event.step

    async def evaluate_forever(self) -> None:
        """Make the evaluations that are due, one after another.

        Consumes what is due, waits for prompts and for the rollouts; unblocks `finish`.

        Raises:
            RunFailed: none of the held-out prompts can be used.
            UserError: none of them is short enough.
        """
        prompts: list[Prompt] = []
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._config is None or self._least_version is None:
                continue
            prompts = prompts or await self._prompts(self._config.prompts)
            self._number += 1
            evaluation = self.running = Evaluation(
                self._number, prompts, self._config.samples, least_version=self._least_version
            )
            self._least_version = None
            started = self._now()
            while not evaluation.done:
                self._fleet.wake_all()
                await self._changed.wait()
                self._changed.clear()
            self.running = None
            self._report(evaluation, self._now() - started)
            self._fleet.wake_all()  # its hosts may take newer weights
            self._changed.set()

    async def _prompts(self, count: int) -> list[Prompt]:
        records: list[PromptRecord] = []
        exhausted = False
        while len(records) < count and not exhausted:
            answer = await self._fetch(len(records), min(FETCHED_AT_ONCE, count - len(records)))
            records += answer.prompts
            exhausted = answer.exhausted
        failures = [f"prompt {record.prompt_id}: {record.error}" for record in records if record.error]
        fitting = [
            record for record in records if not record.error and 0 < len(record.token_ids) <= self._max_prompt_tokens
        ]
        self._rejected = len(records) - len(fitting)
        if failures and not fitting:
            raise RunFailed(f"evaluation.source: none of its first {len(records)} prompts can be used: {failures[-1]}")
        if not fitting:
            raise UserError(
                f"evaluation.source: none of its first {len(records)} prompts has between 1 and {self._max_prompt_tokens} "
                "tokens (data.max_prompt_tokens); raise that, or check data.prompt_template"
            )
        if self._rejected:
            why = failures[-1] if failures else "they are longer than data.max_prompt_tokens"
            text = f"{self._rejected} of {len(records)} held-out prompts are left out: {why}"
            self._events.emit(Notice(level="warning", text=text))
        return [prompt_of(record) for record in fitting]

    async def finish(self, limit_s: float) -> None:
        """Training is over: wait for what runs and is due, with all rollouts at hand; at most `limit_s` without progress."""
        self._share = 1.0
        self._fleet.wake_all()
        got_further = asyncio.Event()
        self._events.subscribe(lambda _: got_further.set(), TrajectoryFinished, TrajectoryScored, EvaluationFinished)
        self._control.on_change.append(got_further.set)
        while self.busy and not self._control.stop_requested.is_set():
            got_further.clear()
            try:
                async with asyncio.timeout(None if self._control.generation_paused else limit_s):
                    await got_further.wait()
            except TimeoutError:
                break
        if self.busy:
            why = "as asked" if self._control.stop_requested.is_set() else f"nothing came for {limit_s:g} s"
            running = self.running
            far = f" ({running.scored} of {len(running.trajectories)} responses scored)" if running is not None else ""
            self._events.emit(Notice(level="warning", text=f"the evaluation was given up{far}: {why}"))

    def _report(self, evaluation: Evaluation, seconds: float) -> None:
        assert self._config is not None and evaluation.policy_version is not None
        responses = evaluation.responses()
        result = summarize(
            responses,
            evaluation=evaluation.number,
            step=self._step_of.get(evaluation.policy_version, 0),
            policy_version=evaluation.policy_version,
            samples=self._config.samples,
            pass_reward=self._config.pass_reward,
            prompts_rejected=self._rejected,
            started_over=evaluation.started_over,
            seconds=seconds,
        )
        self.results.append(result)
        self._events.emit(EvaluationResponses(responses=responses))
        self._events.emit(EvaluationFinished(result=result))

    # ------------------------------------------------------------ where

    def _places(self) -> int:
        """Trajectories that evaluation may have in progress."""
        return max(1, int(self._share * len(self._fleet.replicas) * self._max_running))

    def claim(self, replica: Replica) -> bool:
        """Whether this rollout is a host of the evaluation and has to stay with its version; made one if one more is needed."""
        evaluation = self.running
        if evaluation is None or evaluation.policy_version is None or replica.leaving:
            return False
        if evaluation.policy_version != replica.policy_version:
            evaluation.hosts.pop(replica.name, None)
            return False
        if not evaluation.waiting:
            return any(trajectory.rollout == replica.name for trajectory in evaluation.in_progress.values())
        if replica.name not in evaluation.hosts:
            for name in [name for name in evaluation.hosts if not self._stays(name)]:
                del evaluation.hosts[name]
            if len(evaluation.hosts) >= math.ceil(self._places() / self._max_running):
                return False
            evaluation.hosts[replica.name] = None
        return True

    def take(self, replica: Replica, room: int, *, may_begin: bool) -> list[Trajectory]:
        """Up to `room` trajectories for this rollout to generate; `may_begin`: an evaluation may take this rollout's version."""
        evaluation = self.running
        if evaluation is None or not evaluation.waiting or self._control.generation_paused:
            return []
        if evaluation.policy_version is not None and not evaluation.in_progress and not self._can_go_on(evaluation):
            self._start_over(evaluation)
        if evaluation.policy_version is None:
            newest = max(evaluation.least_version, replica.relay.stored_version)
            if not may_begin or replica.policy_version < newest:
                return []
            self._begin(evaluation, replica.policy_version)
        if not self.claim(replica):
            return []
        return evaluation.take(max(0, min(room, self._places() - len(evaluation.in_progress))))

    def _stays(self, name: str) -> bool:
        """Whether this rollout is there, and not about to leave."""
        replica = self._fleet.replicas.get(name)
        return replica is not None and not replica.leaving

    def _can_go_on(self, evaluation: Evaluation) -> bool:
        """Whether a rollout that stays serves its version."""
        return any(
            replica.policy_version == evaluation.policy_version and self._stays(replica.name)
            for replica in self._fleet.replicas.values()
        )

    def _begin(self, evaluation: Evaluation, version: int) -> None:
        evaluation.policy_version = version
        self._events.emit(
            EvaluationStarted(
                evaluation=evaluation.number,
                policy_version=version,
                step=self._step_of.get(version, 0),
                trajectories=len(evaluation.trajectories),
            )
        )

    def _start_over(self, evaluation: Evaluation) -> None:
        self._number += 1
        event = EvaluationStartedOver(
            evaluation=evaluation.number,
            goes_on_as=self._number,
            policy_version=evaluation.policy_version or 0,
            responses_lost=evaluation.scored,
            scores_pending=len(evaluation.trajectories) - len(evaluation.waiting) - evaluation.scored,
        )
        evaluation.start_over(self._number)
        self._events.emit(event)

    # ------------------------------------------------------------ what comes back

    def _of(self, trajectory: Trajectory) -> Evaluation | None:
        """The evaluation that runs, if this is one of its trajectories."""
        running = self.running
        return running if running is not None and trajectory.evaluation == running.number else None

    def _on_orphaned(self, event: TrajectoryOrphaned) -> None:
        if event.trajectory.evaluation is not None:
            self._pool.withdraw(event.trajectory)
            if evaluation := self._of(event.trajectory):
                evaluation.orphaned(event.trajectory)

    def _on_rollout_lost(self, event: RolloutLost) -> None:
        if self.running is not None:
            self.running.hosts.pop(event.rollout, None)

    def _on_finished(self, event: TrajectoryFinished | TrajectoryFailed) -> None:
        if evaluation := self._of(event.trajectory):
            evaluation.finished(event.trajectory)

    def _on_scored(self, event: TrajectoryScored) -> None:
        if evaluation := self._of(event.trajectory):
            evaluation.note_text(event.trajectory, event.response_text)

    def scored(self, trajectory: Trajectory) -> None:
        """A trajectory has its reward, or never will: then it counts as wrong."""
        if evaluation := self._of(trajectory):
            evaluation.scored += 1
            if evaluation.done:
                self._changed.set()

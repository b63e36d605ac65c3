"""A run ends as it should: all steps made, the data ended, stopped by the user, or a failure that what struck it justifies.

`docs/invariants.md` lists which faults justify which failure; every other failure is a violation. Afterwards no task of the
controller is left, and every worker that it knew was told to end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from laminar.controller.environment_manager import score_limit_s
from laminar.errors import RunFailed, UserError
from laminar.observability.events import CheckpointFinished, RolloutLost, WorkerReady
from laminar.simulation.faults import fault as faults
from laminar.simulation.faults.injector import Strike
from laminar.simulation.faults.invariants.invariant import Invariant, Observed
from laminar.simulation.faults.invariants.losses import LossesHaveCauses
from laminar.simulation.faults.invariants.once import EachPromptEndsOnce

WORKER = re.compile(r"(?:rollout|relay|trainer|environment)-\d+")


class EndsAsItShould(Invariant):
    """See the module's text."""

    name = "the run ends as it should"

    def __init__(
        self, run: Observed, strikes: list[Strike], losses: LossesHaveCauses, ledger: EachPromptEndsOnce
    ) -> None:
        super().__init__(run)
        self.tasks_left: list[str] = []  # names; filled when the controller's `run` returns
        self.told: dict[str, None] = {}  # peers that were sent Shutdown
        self._strikes = strikes
        self._losses = losses
        self._ledger = ledger
        self._checkpoint_error = ""
        self._rollout_losses: dict[str, int] = {}
        self._was_ready: dict[str, None] = {}

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """See `Invariant`."""
        return {
            CheckpointFinished: self._on_checkpoint,
            RolloutLost: self._on_rollout_lost,
            WorkerReady: self._on_ready,
        }

    def _on_checkpoint(self, event: CheckpointFinished) -> None:
        self._checkpoint_error = event.error

    def _on_rollout_lost(self, event: RolloutLost) -> None:
        self._rollout_losses[event.rollout] = self._rollout_losses.get(event.rollout, 0) + 1

    def _on_ready(self, event: WorkerReady) -> None:
        self._was_ready[event.worker] = None

    # ------------------------------------------------------------ the end

    def judge(self, failure: BaseException | None) -> str:
        """How the run ended, in a few words. Raises InvariantViolation if it should not have."""
        if failure is None:
            how = self._well()
        elif isinstance(failure, RunFailed | UserError):
            why = self._justified(str(failure))
            if not why:
                self.fail(f"{type(failure).__name__}: {failure}\nNothing that struck the run justifies this.")
            how = f"failed, justified by {why}"
        else:
            self.fail(f"{type(failure).__name__}: {failure}")
        if self.tasks_left:
            self.fail(f"tasks are left: {', '.join(self.tasks_left)}")
        untold = [
            worker.name for worker in self.controller.registry.workers.values() if worker.peer.decode() not in self.told
        ]
        if untold:
            self.fail(f"{', '.join(untold)} were not told to end")
        return how

    def _well(self) -> str:
        trainer, config = self.controller.trainer, self.run.config
        if trainer.step == config.trainer.steps:
            return "all steps made"
        if self.controller.control.stop_requested.is_set():
            if not any(isinstance(strike.fault, faults.Stop) for strike in self._strikes):
                self.fail(f"stopped at step {trainer.step}, and nobody asked for it")
            return "stopped"
        if missing := self._ledger.unfinished_epoch():
            self.fail(f"ended at step {trainer.step} of {config.trainer.steps} as if the data had ended: {missing}")
        return "the data ended"

    def _justified(self, message: str) -> str:
        """What justifies this failure; empty if nothing does."""
        config = self.run.config
        if "Set reward.on_invalid" in message:
            bad = config.reward.on_invalid == "fail" and (self._any(faults.BadReward) or self._environment_struck())
            return "a bad reward, and reward.on_invalid: fail" if bad else ""
        if "Set environment.on_error" in message:
            bad = config.environment.on_error == "fail" and (self._any(faults.BadTurn) or self._environment_struck())
            return "a turn without an answer, and environment.on_error: fail" if bad else ""
        if "the environment has answered no turn meanwhile" in message:
            return "bad turns, one after the other" if self._any(faults.BadTurn) else ""
        if "groups in a row had no valid reward" in message:
            return "bad rewards" if self._any(faults.BadReward) or self._environment_struck() else ""
        if message.startswith("the final checkpoint could not be written"):
            failed = bool(self._checkpoint_error) and self._any(faults.FailedCheckpoint)
            return "a full disk at the final checkpoint" if failed else ""
        if message.startswith("no rollout is left"):
            return self._no_rollout_left(message)
        if message.startswith("no relay is left"):
            return "the loss of every relay, more often than relay.restarts" if self._relays_given_up() else ""
        if "no attempt left" in message:
            return "the environment workers' ends" if self._environment_struck() else ""
        if "for the batch of step" in message:
            if self._waits_for_lost_version():
                return "rollout.on_lost_version: wait"
            return "rewards that hang, one after the other" if self._rewards_hang() else ""
        if message.startswith("data.max_prompt_tokens: all"):
            prompts = self.controller.prompts
            return "prompts that are all too long" if prompts.exhausted and prompts.rejected == prompts.cursor else ""
        if message.startswith("evaluation.source: none"):
            return "held-out prompts that are all too long" if self._held_out_too_long() else ""
        if "(trainer.restarts)" in message:
            return "the trainer's losses, more than trainer.restarts" if self._trainer_given_up() else ""
        workers = WORKER.findall(message)
        if message.startswith("controller.start_timeout_s"):
            starting = self.controller.trainer.policy_version < 0
            struck = bool(workers) and all(self._struck(name) for name in workers)
            return "outages during the start" if starting and struck else ""
        if not workers:
            return ""
        return self._lost_worker(workers[0], message)

    def _held_out_too_long(self) -> bool:
        evaluation, limit = self.run.config.evaluation, self.run.config.data.max_prompt_tokens
        lengths = [self.run.workload.prompt_tokens(prompt) for prompt in range(evaluation.prompts if evaluation else 0)]
        return bool(lengths) and min(lengths) > limit

    def _lost_worker(self, name: str, message: str) -> str:
        if self._losses.cause(name) is None:
            return ""
        if name.startswith("trainer"):
            no_way_back = not self.run.config.trainer.checkpoint_every or self.controller.trainer.policy_version < 0
            return "the loss of the trainer, without checkpoints" if no_way_back else ""
        started = self.controller.trainer.policy_version >= 0  # all were ready, and the first weights are out
        if ("did not start" in message or "its process ended" in message) and (
            not started or name not in self._was_ready
        ):
            return f"the end of a {name.partition('-')[0]} worker during the start"
        return ""

    def _trainer_given_up(self) -> bool:
        """It was struck more often than trainer.restarts: each strike can end one attempt."""
        strikes = {(strike.at, strike.fault) for strike in self._strikes if strike.worker.startswith("trainer")}
        return len(strikes) > self.run.config.trainer.restarts

    def _relays_given_up(self) -> bool:
        """Each was struck more often than relay.restarts: a strike can end an attempt."""
        relay = self.run.config.relay
        struck = Counter(strike.worker for strike in self._strikes)
        return all(struck[f"relay-{rank}"] > relay.restarts for rank in range(relay.count))

    def _no_rollout_left(self, message: str) -> str:
        """All of them were lost more often than rollout.restarts allows, could not come back, or had to leave."""
        for name in self.controller.fleet.health.members:
            used_up = self._rollout_losses.get(name, 0) > self.run.config.rollout.restarts
            lost = self._losses.cause(name) and self._rollout_losses.get(name)
            if not used_up and not lost and not self._had_to_leave(name):
                return ""
        return "the loss of every rollout"

    def _had_to_leave(self, name: str) -> bool:
        leave = (faults.Remove, faults.Drain, faults.SpotNotice)
        return any(strike.worker == name and isinstance(strike.fault, leave) for strike in self._strikes)

    def _waits_for_lost_version(self) -> bool:
        """Trajectories of a rollout that is gone wait for a version that no rollout serves, as the config asks for."""
        gone = self._rollout_losses or any(map(self._had_to_leave, self.controller.fleet.health.members))
        if self.run.config.rollout.on_lost_version != "wait" or not gone:
            return False
        served = {replica.policy_version for replica in self.controller.rollouts.replicas.values()}
        orphans = self.controller.pool.orphans.values()
        return any(orphan.versions and orphan.policy_version not in served for orphan in orphans)

    def _rewards_hang(self) -> bool:
        """Rewards or turns are pending, and those that hung have taken their workers at least half of the trainer's patience."""
        config, lost_s = self.run.config, 0.0
        for strike in self._strikes:
            match strike.fault:
                case faults.BadReward(how="hang", count=count):
                    lost_s += count * score_limit_s(config) / config.reward.workers
                case faults.BadTurn(how="hang", count=count):
                    lost_s += count * config.environment.step_timeout_s / config.reward.workers
        pending = self.controller.environments.pending_scores + self.controller.turns.pending
        return pending > 0 and lost_s >= config.controller.step_timeout_s / 2

    def _any(self, kind: type[faults.Fault]) -> bool:
        return any(isinstance(strike.fault, kind) for strike in self._strikes)

    def _struck(self, name: str) -> bool:
        return any(strike.worker == name for strike in self._strikes)

    def _environment_struck(self) -> bool:
        return any(strike.worker.startswith("environment-") for strike in self._strikes)

"""The controller's memory on disk: hears of every change and hands it on as transactions.

  event bus, trainer driver --> [ pending statements ] --flush--> JournalWriter --> journal.sqlite

Invariants:
- A transaction is all that happened between two flushes, and the loop is between two of its steps at a flush: so each is one
  consistent cut of data cursor, groups, leases, consumption and versions.
- What a worker is told is written before it is told (`written`): a lease, a step, a version. So the next controller knows of
  everything that a worker may know of. That also bounds the backlog: where the disk does not keep up, no new work starts.
- Tokens of unfinished trajectories are written every TAILS_S seconds, all others with the event that made them count.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from laminar.controller.journal.fates import fate_of
from laminar.controller.journal.restore import Restored
from laminar.controller.journal.trainer_order import TrainerOrder
from laminar.controller.journal.writer import JournalWriter, Statement, Transaction
from laminar.controller.waiting import within
from laminar.errors import JournalStuck, RunFailed
from laminar.observability import events as kinds
from laminar.observability.events import EventBus
from laminar.trajectory import Group, Prompt, Trajectory

FLUSH_S = 0.5  # at the latest; at once where somebody waits
TAILS_S = 5.0  # between two looks at the tokens of unfinished trajectories: their rollouts have them, too

_SET = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_GROUP = "INSERT INTO groups (group_id, prompt_id, policy_version) VALUES (?, ?, ?)"
_PROMPT = "INSERT INTO prompts VALUES (?, ?, ?, ?, ?, ?)"
_TRAJECTORY = (
    "INSERT INTO trajectories (group_id, member, lease, rollout, versions, started_at) VALUES (?, ?, ?, ?, ?, ?)"
)
_LEASE = "UPDATE trajectories SET lease = ?, rollout = ?, versions = ?, waits = '' WHERE group_id = ? AND member = ?"
_TURN = "UPDATE trajectories SET waits = ?, turns = ? WHERE group_id = ? AND member = ?"
_ROLLOUT = "INSERT OR REPLACE INTO rollouts VALUES (?, ?)"
_TOKENS = "INSERT INTO tokens VALUES (?, ?, ?, ?, ?)"
_NO_TOKENS = "DELETE FROM tokens WHERE group_id = ? AND member = ?"
_FINISHED = "UPDATE trajectories SET finish_reason = ?, finished_at = ? WHERE group_id = ? AND member = ?"
_REWARD = "UPDATE trajectories SET reward = ? WHERE group_id = ? AND member = ?"
_COMPLETED = "UPDATE groups SET completed = ? WHERE group_id = ?"
_FATE = "UPDATE groups SET fate = ?, step = ?, part = ? WHERE group_id = ?"
_DROPPED = "UPDATE groups SET fate = 'dropped', step = NULL, part = NULL, kind = ?, reason = ? WHERE group_id = ?"
_REJECTED = "INSERT OR IGNORE INTO rejected VALUES (?, ?, ?)"
_CHECKPOINT = "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)"
_HOST = "INSERT OR REPLACE INTO hosts VALUES (?, ?)"
_OF_GROUP = tuple(f"DELETE FROM {table} WHERE group_id = ?" for table in ("tokens", "trajectories", "prompts"))
# Groups whose steps every checkpoint that is kept holds: nobody asks for their tokens any more.
_OF_OLD_STEPS = tuple(
    f"DELETE FROM {table} WHERE group_id IN (SELECT group_id FROM prompts JOIN groups USING (group_id) "
    "WHERE fate = 'trained' AND step <= (SELECT min(step) FROM (SELECT step FROM checkpoints ORDER BY step DESC LIMIT ?)))"
    for table in ("tokens", "trajectories", "prompts")
)
_NO_GROUP = "DELETE FROM groups WHERE group_id = ?"
_NEWER_CHECKPOINTS = "DELETE FROM checkpoints WHERE step > ?"


class Journal:
    """Of one controller's life; `restore.py` reads it for the next."""

    def __init__(self, writer: JournalWriter, *, keep_checkpoints: int, keep_trained: bool, limit_s: float) -> None:
        """
        Args:
            keep_checkpoints: that a run may be resumed from.
            keep_trained: keep the tokens of trained groups until a checkpoint holds their step; else, after a crash, their
                prompts are generated anew.
            limit_s: longest wait for the disk.
        """
        self.transactions = 0
        self._writer = writer
        self._keep_checkpoints, self._keep_trained = keep_checkpoints, keep_trained
        self._limit_s = limit_s
        self._completed = 0  # groups, ever
        self._pending: list[Statement] = []
        self._unwritten: deque[asyncio.Future[None]] = deque()  # one for each transaction that is not written yet
        self._recorded: dict[str, int] = {}  # tokens that the journal has of each unfinished trajectory
        self._again: dict[int, int] = {}  # prompt to be drawn again -> the group that it was drawn for
        self._groups: dict[int, None] = {}  # that have begun and not ended
        self._policy_version = -1
        self._evaluations = 0  # that are due or under way

    def subscribe(self, events: EventBus) -> None:
        """Write down what happens from now on."""
        handlers: dict[type, Callable[[Any], None]] = {
            kinds.TrajectoryStarted: self._on_started,
            kinds.TrajectoryMoved: self._on_moved,
            kinds.TrajectoryRestarted: self._on_started_over,
            kinds.TurnEnded: self._on_turn_ended,
            kinds.TurnAnswered: self._on_turn_answered,
            kinds.TrajectoryFinished: self._on_finished,
            kinds.TrajectoryScored: self._on_scored,
            kinds.GroupCompleted: self._on_completed,
            kinds.GroupDropped: self._on_dropped,
            kinds.GroupsReturned: self._on_returned,
            kinds.StepFinished: self._on_step,
            kinds.WeightsPublished: self._on_published,
            kinds.CheckpointFinished: self._on_checkpoint,
            kinds.PromptRejected: self._on_rejected,
            kinds.WorkerJoined: self._on_joined,
            kinds.RolloutHealthChanged: self._on_health,
            kinds.EvaluationDue: lambda event: self._note_evaluations(1),
            kinds.EvaluationFinished: lambda event: self._note_evaluations(-1),
        }

        def handle(event: Any) -> None:
            trajectory: Trajectory | None = getattr(event, "trajectory", None)
            if (
                trajectory is None or trajectory.evaluation is None
            ):  # an evaluation is made anew rather than gone on with
                handlers[type(event)](event)

        events.subscribe(handle, *handlers)

    def knows(self, restored: Restored) -> None:
        """What was restored is in the journal already."""
        self._policy_version = restored.policy_version
        self._completed = restored.completed
        for group_id, prompt in restored.again.items():
            self._note_again(group_id, prompt)
        for group in restored.groups:
            self._groups[group.group_id] = None
            for trajectory in group.trajectories:
                if trajectory.finish_reason is None:
                    self._recorded[trajectory.trajectory_id] = trajectory.num_tokens

    # ------------------------------------------------------------ writing

    async def written(self) -> None:
        """Wait until all that has happened so far is with the operating system: it outlives this process.

        Raises:
            JournalStuck: the disk did not take it within the limit.
        """
        if self._pending:
            self._flush(durable=False)
        await self._wait()

    async def durable(self) -> None:
        """The same, on the disk itself: it outlives the machine's end. Raises JournalStuck as `written`."""
        self._flush(durable=True)
        await self._wait()

    async def _wait(self) -> None:
        if self._unwritten:
            try:
                await within(self._limit_s, "the disk to take the journal", asyncio.shield(self._unwritten[-1]))
            except RunFailed as error:
                raise JournalStuck(f"{error} (controller.step_timeout_s)") from None

    async def keep_forever(self, unfinished: Iterable[Trajectory]) -> None:
        """Write what nobody waits for, twice a second; and what `unfinished`, iterated anew each time, have gained."""
        ticks = 0
        while True:
            await asyncio.sleep(FLUSH_S)
            ticks += 1
            if ticks * FLUSH_S >= TAILS_S:
                ticks = 0
                self.note_tails(unfinished)
            if self._pending:
                self._flush(durable=False)

    def note_tails(self, unfinished: Iterable[Trajectory]) -> None:
        """The tokens that they have gained since the last time."""
        for trajectory in unfinished:
            self._note_tail(trajectory)

    def close(self) -> None:
        """Write what is left, to the disk, and end."""
        self._flush(durable=True)
        self._writer.close()

    def _flush(self, *, durable: bool) -> None:
        statements, self._pending = self._pending, []
        self.transactions += 1
        self._unwritten.append(asyncio.get_running_loop().create_future())
        self._writer.submit(Transaction(statements=statements, durable=durable, done=self._done))

    def _done(self) -> None:
        future = self._unwritten.popleft()
        if not future.done():
            future.set_result(None)

    # ------------------------------------------------------------ told by a person

    def note_asked(self, asked: Sequence[str]) -> None:
        """What holds of that now; written at once, for the person is told that it holds."""
        self._set("asked", json.dumps(asked))
        self._flush(durable=False)

    # ------------------------------------------------------------ told by the trainer driver

    def note_order(self, order: TrainerOrder, issued: int) -> None:
        """The ranks are about to be told this; `issued` is the newest version that they were ever told to publish."""
        self._set("order", order.to_json())
        self._set("issued", issued)
        for group_id in order.group_ids:
            self._pending.append((_FATE, ("training", order.step, order.part, group_id)))

    def note_answered(self, number: int) -> None:
        """All ranks have done it."""
        self._set("order", "")
        self._set("last_order", number)

    def note_again(self, groups: Iterable[Group]) -> None:
        """Nothing of these is left but their prompts, which are to be drawn again."""
        for group in groups:
            self._note_again(group.group_id, group.prompt)

    def _note_again(self, group_id: int, prompt: Prompt) -> None:
        self._again[prompt.prompt_id] = group_id
        self._pending.append((_FATE, (None, None, None, group_id)))
        self._pending.append((_COMPLETED, (None, group_id)))
        self._pending += [(statement, (group_id,)) for statement in _OF_GROUP[:2]]

    def note_step(self, step: int) -> None:
        """The trainer stands at an earlier step again."""
        self._set("step", step)
        self._set("order", "")
        self._pending.append((_NEWER_CHECKPOINTS, (step,)))

    def _set(self, key: str, value: object) -> None:
        self._pending.append((_SET, (key, str(value))))

    # ------------------------------------------------------------ heard on the bus

    def _on_started(self, event: kinds.TrajectoryStarted) -> None:
        trajectory = event.trajectory
        group_id, member = key_of(trajectory)
        if group_id not in self._groups:
            self._groups[group_id] = None
            prompt = trajectory.prompt
            if (old := self._again.pop(prompt.prompt_id, None)) is not None:
                self._pending += [(statement, (old,)) for statement in (*_OF_GROUP, _NO_GROUP)]
            self._pending.append((_GROUP, (group_id, prompt.prompt_id, trajectory.policy_version)))
            values = (group_id, prompt.source, prompt.text, prompt.token_ids, prompt.answer, prompt.metadata)
            self._pending.append((_PROMPT, values))
        versions = json.dumps(trajectory.versions)
        self._pending.append(
            (_TRAJECTORY, (group_id, member, trajectory.lease, trajectory.rollout, versions, trajectory.started_at))
        )
        self._recorded[trajectory.trajectory_id] = 0

    def _on_moved(self, event: kinds.TrajectoryMoved) -> None:
        """With all its tokens: its next rollout sends those that follow."""
        trajectory = event.trajectory
        self._note_tail(trajectory)
        versions = json.dumps(trajectory.versions)
        self._pending.append((_LEASE, (trajectory.lease, trajectory.rollout, versions, *key_of(trajectory))))

    def _on_started_over(self, event: kinds.TrajectoryRestarted) -> None:
        trajectory = event.trajectory
        self._recorded[trajectory.trajectory_id] = 0
        self._pending.append((_NO_TOKENS, key_of(trajectory)))
        self._pending.append((_LEASE, (trajectory.lease, None, "[]", *key_of(trajectory))))
        self._pending.append((_TURN, ("", "[]", *key_of(trajectory))))

    def _on_turn_ended(self, event: kinds.TurnEnded) -> None:
        self._note_turns(event.trajectory, "environment")

    def _on_turn_answered(self, event: kinds.TurnAnswered) -> None:
        self._note_turns(event.trajectory, "rollout")

    def _note_turns(self, trajectory: Trajectory, waits_for: str) -> None:
        self._note_tail(trajectory)
        turns = [(turn.start, turn.end, turn.observation_end, turn.reward, turn.seconds) for turn in trajectory.turns]
        self._pending.append((_TURN, (waits_for, json.dumps(turns), *key_of(trajectory))))

    def _on_finished(self, event: kinds.TrajectoryFinished) -> None:
        trajectory = event.trajectory
        self._note_tail(trajectory)
        self._recorded.pop(trajectory.trajectory_id, None)
        values = (trajectory.finish_reason, trajectory.finished_at, *key_of(trajectory))
        self._pending.append((_FINISHED, values))

    def _on_scored(self, event: kinds.TrajectoryScored) -> None:
        self._pending.append((_REWARD, (event.trajectory.reward, *key_of(event.trajectory))))

    def _on_completed(self, event: kinds.GroupCompleted) -> None:
        self._completed += 1
        self._pending.append((_COMPLETED, (self._completed, event.group.group_id)))

    def _on_dropped(self, event: kinds.GroupDropped) -> None:
        group = event.group
        self._forget(group)
        self._pending.append((_DROPPED, (fate_of(event), event.reason, group.group_id)))
        self._pending += [(statement, (group.group_id,)) for statement in _OF_GROUP]

    def _on_returned(self, event: kinds.GroupsReturned) -> None:
        for group in event.groups:
            self._groups[group.group_id] = None
            self._completed += 1
            self._pending.append((_FATE, (None, None, None, group.group_id)))
            self._pending.append((_COMPLETED, (self._completed, group.group_id)))

    def _on_step(self, event: kinds.StepFinished) -> None:
        self._set("step", event.step)
        for group in event.groups:
            self._forget(group)
            self._pending.append((_FATE, ("trained", event.step, None, group.group_id)))
            if not self._keep_trained:
                self._pending += [(statement, (group.group_id,)) for statement in _OF_GROUP[:2]]

    def _on_published(self, event: kinds.WeightsPublished) -> None:
        self._policy_version = event.policy_version
        self._set("policy_version", event.policy_version)

    def _on_checkpoint(self, event: kinds.CheckpointFinished) -> None:
        if not event.error:
            self._pending.append((_CHECKPOINT, (event.step, event.path, self._policy_version)))
            self._pending += [(statement, (self._keep_checkpoints,)) for statement in _OF_OLD_STEPS]

    def _on_rejected(self, event: kinds.PromptRejected) -> None:
        self._pending.append((_REJECTED, (event.prompt_id, event.source, event.reason)))

    def _on_joined(self, event: kinds.WorkerJoined) -> None:
        self._pending.append((_HOST, (event.worker, event.host)))

    def _on_health(self, event: kinds.RolloutHealthChanged) -> None:
        self._pending.append((_ROLLOUT, (event.rollout, event.health)))

    def _note_evaluations(self, more: int) -> None:
        self._evaluations += more
        self._set("evaluations", self._evaluations)

    # ------------------------------------------------------------ tokens

    def _note_tail(self, trajectory: Trajectory) -> None:
        recorded = self._recorded.get(trajectory.trajectory_id)
        if recorded is None or recorded >= trajectory.num_tokens:
            return
        token_ids, logprobs = trajectory.tail(recorded)
        self._recorded[trajectory.trajectory_id] = trajectory.num_tokens
        self._pending.append((_TOKENS, (*key_of(trajectory), recorded, token_ids, logprobs)))

    def _forget(self, group: Group) -> None:
        self._groups.pop(group.group_id, None)
        for trajectory in group.trajectories:
            self._recorded.pop(trajectory.trajectory_id, None)


class NoJournal:
    """Forgets everything: for studies in virtual time, and to measure what a journal costs."""

    transactions = 0

    def subscribe(self, events: EventBus) -> None:
        """Nothing."""

    def knows(self, restored: Restored) -> None:
        """Nothing."""

    async def written(self) -> None:
        """At once."""

    async def durable(self) -> None:
        """At once."""

    async def keep_forever(self, unfinished: Iterable[Trajectory]) -> None:
        """Nothing."""

    def note_tails(self, unfinished: Iterable[Trajectory]) -> None:
        """Nothing."""

    def note_asked(self, asked: Sequence[str]) -> None:
        """Nothing."""

    def note_order(self, order: TrainerOrder, issued: int) -> None:
        """Nothing."""

    def note_answered(self, number: int) -> None:
        """Nothing."""

    def note_again(self, groups: Iterable[Group]) -> None:
        """Nothing."""

    def note_step(self, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def key_of(trajectory: Trajectory) -> tuple[int, int]:
    """(group id, member) of a trajectory."""
    return trajectory.group_id, int(trajectory.trajectory_id.rpartition(".")[2])

"""From a journal to the state of a controller: a pure function of what the file holds.

Invariant: every prompt that was ever drawn is in exactly one place of the state: in a group (outstanding, in training, or
trained since the checkpoint), among the prompts to be drawn again, or counted as ended.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from laminar.controller.journal.fates import FILTERED, LEFT
from laminar.controller.journal.trainer_order import TrainerOrder
from laminar.trajectory import Group, Prompt, Trajectory, TrajectoryState, Turn


@dataclass(kw_only=True, slots=True, frozen=True)
class Checkpoint:
    """A complete one."""

    step: int
    path: str
    policy_version: int  # of its weights


@dataclass(kw_only=True, slots=True)
class Restored:
    """What a controller takes up where another has left it."""

    life: int  # controllers that there were before
    step: int = 0
    policy_version: int = -1  # newest that was published
    issued: int = -1  # newest that was ever ordered
    last_order: int = 0  # newest that all ranks had answered
    order: TrainerOrder | None = None  # that they had not
    checkpoint: Checkpoint | None = None  # newest
    next_group: int = 0
    cursor: int = 0  # position of the data order after the last that was drawn
    again: dict[int, Prompt] = field(default_factory=dict)  # old group -> prompt to be drawn again, before all others
    rejected: dict[int, str] = field(default_factory=dict)  # prompt -> reason
    outstanding: list[Group] = field(default_factory=list)
    in_training: list[Group] = field(default_factory=list)  # of the step in the making
    parts_made: int = 0  # of that step
    since_checkpoint: list[list[Group]] = field(default_factory=list)  # per step, what it consumed
    trained: int = 0  # groups
    filtered: int = 0  # of the dropped ones, by dynamic sampling
    rollouts: dict[str, str] = field(default_factory=dict)  # health of each, by name
    dropped: int = 0  # without those that were left at the end of the data
    left: int = 0  # at the end of the data
    completed: int = 0  # groups, ever
    evaluating: bool = False  # an evaluation was due or under way
    asked: tuple[str, ...] = ()  # by a person, as `RunControl.asked` has it
    hosts: dict[str, str] = field(default_factory=dict)  # of relays, by name

    def forget_rollouts(self) -> None:
        """All rollouts and relays are new: draw the prompts again of which nothing is left that they could go on with.

        Else these groups would be generated with newer weights than those that their staleness is counted from.
        """
        weights = 0 if self.checkpoint is None else self.checkpoint.policy_version
        served = weights if weights == self.issued else None  # the version that will be published once more
        kept = []
        for group in self.outstanding:
            useful = any(t.finish_reason or (t.num_tokens and t.versions[-1][0] == served) for t in group.trajectories)
            if useful or group.policy_version == served:
                kept.append(group)
            else:
                self.again[group.group_id] = group.prompt
        self.outstanding = kept

    @property
    def groups(self) -> list[Group]:
        """All that have not ended for good."""
        return [*self.outstanding, *self.in_training, *(group for step in self.since_checkpoint for group in step)]


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """The journal's single values."""
    return dict(connection.execute("SELECT key, value FROM meta"))


def restore(connection: sqlite3.Connection) -> Restored:
    """The state at the newest transaction."""
    meta = read_meta(connection)
    state = Restored(life=int(meta.get("life", "0")))
    state.step = int(meta.get("step", "0"))
    state.policy_version = int(meta.get("policy_version", "-1"))
    state.issued = int(meta.get("issued", "-1"))
    state.last_order = int(meta.get("last_order", "0"))
    state.evaluating = meta.get("evaluations", "0") != "0"
    state.asked = tuple(json.loads(meta.get("asked", "[]")))
    state.order = TrainerOrder.from_json(meta["order"]) if meta.get("order") else None
    newest = connection.execute(
        "SELECT step, path, policy_version FROM checkpoints ORDER BY step DESC LIMIT 1"
    ).fetchone()
    if newest is not None:
        state.checkpoint = Checkpoint(step=newest[0], path=newest[1], policy_version=newest[2])
    state.rejected = dict(connection.execute("SELECT prompt_id, reason FROM rejected"))
    state.hosts = dict(connection.execute("SELECT worker, host FROM hosts"))
    counts = dict(connection.execute("SELECT fate, count(*) FROM groups GROUP BY fate"))
    dropped = dict(connection.execute("SELECT kind, count(*) FROM groups WHERE kind IS NOT NULL GROUP BY kind"))
    state.left, state.filtered = dropped.get(LEFT, 0), dropped.get(FILTERED, 0)
    state.rollouts = dict(connection.execute("SELECT name, health FROM rollouts"))
    state.trained, state.dropped = counts.get("trained", 0), counts.get("dropped", 0) - state.left
    last_group, last_prompt, completed = connection.execute(
        "SELECT max(group_id), max(prompt_id), max(completed) FROM groups"
    ).fetchone()
    state.next_group = 0 if last_group is None else last_group + 1
    state.cursor = 0 if last_prompt is None else last_prompt + 1
    state.completed = completed or 0
    _sort_groups(state, connection)
    return state


def _sort_groups(state: Restored, connection: sqlite3.Connection) -> None:
    members = _members(connection)
    base = 0 if state.checkpoint is None else state.checkpoint.step
    consumed: dict[int, list[Group]] = {step: [] for step in range(base + 1, state.step + 1)}
    ready: list[tuple[int, Group]] = []
    unready: list[Group] = []
    rows = connection.execute(
        "SELECT group_id, prompt_id, policy_version, completed, fate, step, part, source, text, token_ids, answer, metadata "
        "FROM prompts JOIN groups USING (group_id) ORDER BY group_id"
    )
    for group_id, prompt_id, version, completed, fate, step, part, source, text, token_ids, answer, metadata in rows:
        prompt = Prompt(
            prompt_id=prompt_id,
            source=source,
            text=text,
            token_ids=np.frombuffer(token_ids, np.int32),
            answer=answer,
            metadata=metadata,
        )
        group = Group(group_id=group_id, prompt=prompt, trajectories=[], policy_version=version)
        group.trajectories = [_trajectory(group, row) for row in members.get(group_id, [])]
        if fate is None and not group.trajectories:
            state.again[group_id] = prompt
        elif fate == "trained":
            _all(group, TrajectoryState.CONSUMED)
            for trajectory in group.trajectories:
                trajectory.step = step
            if step in consumed:
                consumed[step].append(group)
        elif fate == "training":
            _all(group, TrajectoryState.TRAINING)
            for trajectory in group.trajectories:
                trajectory.staleness = state.policy_version - (trajectory.policy_version or 0)
            state.in_training.append(group)
            trained_now = state.order is not None and state.order.kind == "train" and part == state.order.part
            state.parts_made = max(state.parts_made, part + (not trained_now))
        elif completed is not None:
            _all(group, TrajectoryState.BUFFERED)
            ready.append((completed, group))
        else:
            unready.append(group)
    ready.sort(key=lambda entry: entry[0])
    state.outstanding = [*(group for _, group in ready), *unready]
    state.since_checkpoint = [consumed[step] for step in sorted(consumed)]


def _members(connection: sqlite3.Connection) -> dict[int, list[dict[str, Any]]]:
    """Per group its trajectories' rows, each with its pieces of tokens."""
    pieces: dict[tuple[int, int], list[tuple[int, bytes, bytes]]] = {}
    tokens = connection.execute(
        "SELECT group_id, member, start, token_ids, logprobs FROM tokens ORDER BY group_id, member, start"
    )
    for group_id, member, start, token_ids, logprobs in tokens:
        pieces.setdefault((group_id, member), []).append((start, token_ids, logprobs))
    members: dict[int, list[dict[str, Any]]] = {}
    cursor = connection.execute("SELECT * FROM trajectories ORDER BY group_id, member")
    names = [column[0] for column in cursor.description]
    for values in cursor:
        row = dict(zip(names, values, strict=True))
        row["pieces"] = pieces.get((row["group_id"], row["member"]), [])
        members.setdefault(row["group_id"], []).append(row)
    return members


def _trajectory(group: Group, row: dict[str, Any]) -> Trajectory:
    """Its state is that of its own progress; the group's fate decides about the rest."""
    trajectory = Trajectory(
        trajectory_id=f"{group.group_id}.{row['member']}",
        group_id=group.group_id,
        prompt=group.prompt,
        versions=[(version, first) for version, first in json.loads(row["versions"])],
        lease=row["lease"],
        rollout=row["rollout"],
        finish_reason=row["finish_reason"],
        reward=row["reward"],
        turns=[
            Turn(start=start, end=end, observation_end=observation_end, reward=reward, seconds=seconds)
            for start, end, observation_end, reward, seconds in json.loads(row["turns"])
        ],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
    )
    trajectory.policy_version = trajectory.versions[0][0] if trajectory.versions else group.policy_version
    for start, token_ids, logprobs in row["pieces"]:
        if start != trajectory.num_tokens:
            raise RuntimeError(
                f"trajectory {trajectory.trajectory_id}: tokens from {start} on after {trajectory.num_tokens}"
            )
        trajectory.append(np.frombuffer(token_ids, np.int32), np.frombuffer(logprobs, np.float32))
    if trajectory.finish_reason is None:
        waits = TrajectoryState.ENVIRONMENT if row["waits"] == "environment" else TrajectoryState.ORPHANED
        leased = trajectory.rollout and trajectory.versions and not row["waits"]
        trajectory.state = TrajectoryState.GENERATING if leased else waits
        if trajectory.state is TrajectoryState.ORPHANED:
            trajectory.rollout = None
    else:
        trajectory.state = TrajectoryState.FINISHED if trajectory.reward is None else TrajectoryState.SCORED
    return trajectory


def _all(group: Group, state: TrajectoryState) -> None:
    for trajectory in group.trajectories:
        trajectory.state = state

"""Prompt, group and trajectory: what the controller keeps of everything that is generated.

Invariants: a trajectory has one `policy_version` for all its tokens, fixed when its generation starts (under the schedule
`partial` it goes on with newer ones, and `versions` says from which token); a lease number grows with every assignment to
a rollout, so that what an earlier assignment still sends can be told apart and dropped; tokens are kept as they were
generated, and `turns` says which of them an environment wrote.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", np.int32, np.float32)

NO_TOKEN_IDS = np.empty(0, np.int32)
NO_LOGPROBS = np.empty(0, np.float32)

MAX_PIECES = 32  # of a response, before they are joined
SMALL_PIECE = 256  # tokens: on average shorter, pieces take more memory and time than one copy of them

# "turns": environment.max_turns are used up; "error": the environment failed.
FINISH_REASONS = ("stop", "length", "abort", "turns", "error")


class TrajectoryState(enum.Enum):
    """Where a trajectory is in its life; `docs/architecture.md` has the picture."""

    __hash__ = object.__hash__  # enum's own is python code, and every change of state looks into a table

    QUEUED = "queued"
    GENERATING = "generating"
    ENVIRONMENT = "environment"
    MIGRATING = "migrating"
    ORPHANED = "orphaned"
    FINISHED = "finished"
    SCORED = "scored"
    BUFFERED = "buffered"
    TRAINING = "training"
    CONSUMED = "consumed"
    EVICTED = "evicted"
    FAILED = "failed"


# The arrows of the picture. A change that is not here is a bug in the controller and raises.
ALLOWED_TRANSITIONS: dict[TrajectoryState, frozenset[TrajectoryState]] = {
    TrajectoryState.QUEUED: frozenset({TrajectoryState.GENERATING, TrajectoryState.EVICTED}),
    TrajectoryState.GENERATING: frozenset(
        {
            TrajectoryState.FINISHED,
            TrajectoryState.ENVIRONMENT,
            TrajectoryState.MIGRATING,
            TrajectoryState.ORPHANED,
            TrajectoryState.FAILED,
            TrajectoryState.EVICTED,
        }
    ),
    TrajectoryState.ENVIRONMENT: frozenset(
        {TrajectoryState.FINISHED, TrajectoryState.MIGRATING, TrajectoryState.ORPHANED, TrajectoryState.EVICTED}
    ),
    TrajectoryState.MIGRATING: frozenset(
        {TrajectoryState.GENERATING, TrajectoryState.FINISHED, TrajectoryState.ORPHANED, TrajectoryState.EVICTED}
    ),
    TrajectoryState.ORPHANED: frozenset(
        {TrajectoryState.GENERATING, TrajectoryState.FINISHED, TrajectoryState.QUEUED, TrajectoryState.EVICTED}
    ),
    TrajectoryState.FINISHED: frozenset({TrajectoryState.SCORED, TrajectoryState.FAILED, TrajectoryState.EVICTED}),
    TrajectoryState.SCORED: frozenset({TrajectoryState.BUFFERED, TrajectoryState.EVICTED}),
    TrajectoryState.BUFFERED: frozenset({TrajectoryState.TRAINING, TrajectoryState.EVICTED}),
    TrajectoryState.TRAINING: frozenset({TrajectoryState.CONSUMED, TrajectoryState.BUFFERED}),
    TrajectoryState.CONSUMED: frozenset({TrajectoryState.BUFFERED}),  # the trainer lost the step
    TrajectoryState.EVICTED: frozenset(),
    TrajectoryState.FAILED: frozenset(),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """One entry of the data, tokenized."""

    prompt_id: int  # position in the data order: the data cursor that produced it
    source: str  # data set that it came from, e.g. "spell_backward"
    text: str
    token_ids: NDArray[np.int32]  # int32 [P]
    answer: str
    metadata: str  # JSON of the data set's own entry, handed to the reward as it is


@dataclass(kw_only=True, slots=True, frozen=True)
class Turn:
    """A turn that has ended, and what the environment answered; all numbers are of tokens of the response."""

    start: int  # its first token
    end: int  # behind the last token that the policy wrote
    observation_end: int  # behind the observation; `end` where there is none
    reward: float  # that the environment gave for it
    seconds: float  # that the environment took


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """One response to a prompt, from its first token to the step that trained on it."""

    trajectory_id: str
    group_id: int
    prompt: Prompt
    state: TrajectoryState = TrajectoryState.QUEUED
    evaluation: int | None = None  # number of the evaluation that it belongs to, which is never trained; None: none
    policy_version: int | None = None  # fixed when generation starts
    versions: list[tuple[int, int]] = field(default_factory=list)  # (version, index of its first token), in order
    lease: int = 0
    rollout: str | None = None  # name of the replica that has it, or had it last
    token_ids: list[NDArray[np.int32]] = field(default_factory=list)  # pieces of int32 [T]
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)  # pieces of float32 [T]
    num_tokens: int = 0  # T so far
    turns: list[Turn] = field(default_factory=list)  # that an environment has answered, in order
    finish_reason: str | None = None
    reward: float | None = None
    reward_parts: dict[str, float] | None = None  # before weighting, by name
    reward_error: str | None = None  # why there is no valid one, where that counts as a reward of 0
    error: str | None = None
    started_at: float | None = None  # seconds on the controller's clock
    finished_at: float | None = None
    step: int | None = None  # the step that consumed it
    staleness: int | None = None  # versions published between its start and its training

    def move_to(self, state: TrajectoryState) -> None:
        """Change state along an allowed arrow.

        Raises:
            RuntimeError: the arrow does not exist (an error of the controller's, never of a user's).
        """
        if state not in ALLOWED_TRANSITIONS[self.state]:
            raise RuntimeError(f"trajectory {self.trajectory_id}: {self.state.value} -> {state.value} is not allowed")
        self.state = state

    def append(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Add the tokens of one delta (both [D]). They are kept as they are, until there are MAX_PIECES.

        A piece is usually a slice of a message, and keeps the whole message in memory; it also takes as much memory as
        a few dozen tokens. So their number is bounded.
        """
        count = len(token_ids)
        if count != len(logprobs):
            raise RuntimeError(f"trajectory {self.trajectory_id}: {count} token ids with {len(logprobs)} logprobs")
        self.token_ids.append(token_ids)
        self.logprobs.append(logprobs)
        self.num_tokens += count
        if len(self.token_ids) == MAX_PIECES:
            self._join()

    def observe(self, token_ids: NDArray[np.int32]) -> None:
        """Add what an environment wrote, int32 [D]: no logprobs, and not in the loss."""
        self.append(token_ids, np.zeros(len(token_ids), np.float32))

    def complete(self) -> None:
        """No more tokens come: join them now if they are many small pieces, rather than thousands at once in a step."""
        if self.num_tokens < SMALL_PIECE * len(self.token_ids):
            self._join()

    def _join(self) -> None:
        self.token_ids = [self.response_token_ids()]
        self.logprobs = [self.response_logprobs()]

    def forget_tokens(self) -> None:
        """Start over: the version that made the tokens is gone. `policy_version` stays until the next lease."""
        self.token_ids.clear()
        self.logprobs.clear()
        self.versions.clear()
        self.turns.clear()
        self.num_tokens = 0

    @property
    def turn_start(self) -> int:
        """First token of the turn that is being generated."""
        return self.turns[-1].observation_end if self.turns else 0

    @property
    def last_turn(self) -> tuple[int, int]:
        """Tokens from, to (not included) of the last turn that the policy wrote."""
        if self.turns and self.turn_start == self.num_tokens:
            return self.turns[-1].start, self.turns[-1].end
        return self.turn_start, self.num_tokens

    @property
    def environment_reward(self) -> float:
        """What the environment gave for all turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def environment_s(self) -> float:
        """Seconds that the environment took over all turns."""
        return sum(turn.seconds for turn in self.turns)

    def observations(self) -> Iterator[tuple[int, int]]:
        """Tokens from, to (not included) of everything that an environment wrote."""
        return ((turn.end, turn.observation_end) for turn in self.turns if turn.observation_end > turn.end)

    def tail(self, start: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids and logprobs from this number on (both [T - start]); costs what they are, not what came before."""
        missing, first = self.num_tokens - start, len(self.token_ids)
        while missing > 0:
            first -= 1
            missing -= len(self.token_ids[first])
        token_ids, logprobs = _joined(self.token_ids[first:]), _joined(self.logprobs[first:])
        return (token_ids[-missing:], logprobs[-missing:]) if missing else (token_ids, logprobs)

    def response_token_ids(self) -> NDArray[np.int32]:
        """All generated token ids, int32 [T]."""
        return _joined(self.token_ids) if self.token_ids else NO_TOKEN_IDS

    def response_logprobs(self) -> NDArray[np.float32]:
        """The engine's logprob of each generated token, float32 [T]."""
        return _joined(self.logprobs) if self.logprobs else NO_LOGPROBS


def _joined(pieces: list[NDArray[Number]]) -> NDArray[Number]:
    """All pieces as one array; a single one is handed out as it is, for nobody writes to it."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(kw_only=True, slots=True)
class Group:
    """The trajectories of one prompt; advantages need it whole, so it is admitted, buffered and trained whole."""

    group_id: int
    prompt: Prompt
    trajectories: list[Trajectory]
    policy_version: int | None = None  # oldest version among its members

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all members."""
        return sum(trajectory.num_tokens for trajectory in self.trajectories)


def part_means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each part of the reward, over the trajectories that it applies to."""
    values: dict[str, list[float]] = {}
    for each in parts:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(each)) for name, each in values.items()}

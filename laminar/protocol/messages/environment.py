"""What the controller and an environment worker say to each other: prompts, turns, scores."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(kw_only=True, slots=True, frozen=True)
class FetchPrompts:
    """Prompts at these positions of the data order; the same question always has the same answer."""

    start: int
    count: int
    evaluation: bool = False  # of evaluation.source


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptRecord:
    """One tokenized prompt."""

    prompt_id: int
    source: str
    text: str
    token_ids: np.ndarray  # int32 [P]
    answer: str
    metadata: str  # JSON
    error: str = ""  # why it cannot be used: the row is at fault, or the environment could not begin with it


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptsFetched:
    """Answer to `FetchPrompts`; fewer than asked only when the data ends there."""

    start: int
    prompts: tuple[PromptRecord, ...]
    exhausted: bool
    evaluation: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class StepEnvironment:
    """The policy has ended a turn: let the environment answer it.

    An environment worker that has not seen the turns before, or was lost since, goes through them first.
    """

    trajectory_id: str
    lease: int  # under which the turn was generated; names the call
    source: str
    prompt_text: str
    answer: str
    metadata: str
    token_ids: np.ndarray  # int32 [T], the response so far, observations included
    turn_starts: np.ndarray  # int32 [K]: first token of each turn; the last is the one to answer
    turn_ends: np.ndarray  # int32 [K]: behind its last token
    evaluation: bool = False  # of a held-out prompt


@dataclass(kw_only=True, slots=True, frozen=True)
class EnvironmentStepped:
    """The environment's answer to a turn, or why there is none."""

    trajectory_id: str
    lease: int
    token_ids: np.ndarray  # int32 [D], the observation; empty where `done`
    reward: float
    done: bool
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoreTrajectory:
    """A finished trajectory to score."""

    trajectory_id: str
    source: str
    prompt_text: str
    answer: str
    metadata: str
    token_ids: np.ndarray  # int32 [T], the response
    turn_start: int  # of its last turn, which is what is scored
    turn_end: int
    evaluation: bool = False  # a held-out prompt's, scored by the evaluation's reward


@dataclass(kw_only=True, slots=True, frozen=True)
class TrajectoryScored:
    """Its reward, or why there is none."""

    trajectory_id: str
    reward: float  # NaN where error is set
    response_text: str
    error: str
    parts: dict[str, float] = field(default_factory=dict)  # each part of the reward before weighting, by its name

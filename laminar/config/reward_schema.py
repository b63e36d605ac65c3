"""The section `reward`: what scores a trajectory, how the scores are added up, and what is done about those that fail."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Section

Params = dict[str, bool | int | float | str | list[bool | int | float | str]]

DEFAULT_REWARD = "reasoning_gym"


class RewardPart(Section):
    """One term of a weighted sum."""

    function: str
    """A built-in reward, or a dotted path `package.module:function`; see `reward.function`."""
    name: str | None = None
    """Name in metrics and messages; the function's own if not given."""
    weight: float = 1.0
    """Factor of this part in the sum; a penalty has one below 0, or a function that returns values below 0."""
    params: Params = {}
    """Options of the function; see `reward.params`."""
    sources: Annotated[list[str] | None, Field(min_length=1)] = None
    """Score only prompts of these data sets (the name of a source, or of a reasoning-gym data set); null: all."""
    timeout_s: Annotated[float | None, Field(gt=0)] = None
    """Longest time of one attempt, in seconds; `reward.timeout_s` if not given."""
    retries: Annotated[int | None, Field(ge=0, le=100)] = None
    """Further attempts after one that failed; `reward.retries` if not given."""

    @property
    def label(self) -> str:
        """What metrics and messages call it."""
        return self.name if self.name is not None else self.function


class RewardTerms(Section):
    """What scores a response: a function, or several added up."""

    function: str | None = None
    """A built-in reward (`reasoning_gym`, `exact`, `numeric`, `math_verify`, `regex`, `code`, `reward_model`, `length_penalty`; `docs/data-and-rewards.md`), or a dotted path `package.module:function`. null takes `parts`, or the score of the reasoning-gym generator that made the prompt."""
    params: Params = {}
    """Options of the function: those of a built-in are listed below, a function of one's own gets them as keyword arguments."""
    parts: list[RewardPart] = []
    """Several rewards, added up by weight; instead of `function`. The mean of each is in the metrics."""

    def terms(self) -> list[RewardPart]:
        """The parts; a single function is one of weight 1."""
        return list(self.parts) or [RewardPart(function=self.function or DEFAULT_REWARD, params=self.params)]

    @property
    def title(self) -> str:
        """The reward in a few words."""
        return " + ".join(part.label for part in self.terms())


class RewardConfig(RewardTerms):
    """How a finished trajectory is scored, in environment worker processes."""

    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Environment worker processes."""
    calls_per_worker: Annotated[int, Field(ge=1, le=1024)] = 8
    """Trajectories that one worker scores at once."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest time that one attempt at a reward may take, in seconds."""
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    """Further attempts at a reward that raised, took too long, lost its process or returned no finite number."""
    on_invalid: Literal["fail", "drop", "zero"] = "drop"
    """A trajectory without a valid reward after all attempts: drop its group, count it and name it in a warning; `zero` trains it with a reward of 0 instead (8 groups in a row without any valid reward stop the run, either way); `fail` stops the run with the trajectory's id at once."""

    def limit_s(self, part: RewardPart) -> float:
        """Longest time of one attempt at a part, in seconds."""
        return self.timeout_s if part.timeout_s is None else part.timeout_s

    def attempts(self, part: RewardPart) -> int:
        """How often a part is tried at most."""
        return 1 + (self.retries if part.retries is None else part.retries)

    @property
    def longest_s(self) -> float:
        """Longest time that scoring a trajectory may take, in seconds: its parts are scored side by side."""
        return max(self.limit_s(part) * self.attempts(part) for part in self.terms())

"""Dynamic sampling: groups whose rewards are all equal teach nothing, so others are generated in their place.

Invariant: between two steps no more groups are refused than `max_refills` allows, so that a task on which all groups fail (or
all succeed) is slow to train, and never stands still.

Source: DAPO (arXiv 2503.14476) section 3.2.
"""

from __future__ import annotations

import math
from typing import Literal

from laminar.config.algorithm_schema import DynamicSamplingConfig
from laminar.trajectory import Group

Verdict = Literal["keep", "refuse", "limit reached"]


class DynamicSampling:
    """Judges complete groups for the experience buffer; no tasks, no clock."""

    def __init__(self, config: DynamicSamplingConfig, *, groups_per_step: int) -> None:
        self.limit = math.ceil(config.max_refills * groups_per_step)  # groups that may be refused between two steps
        self._enabled = config.enabled
        self._uniform = 0  # groups since the last step whose rewards were all equal

    def judge(self, group: Group) -> Verdict:
        """Of a group that is complete and scored: to be trained, or to be replaced.

        "limit reached" is said once between two steps: it is kept, and so will be the others like it.
        """
        if not self._enabled or len({trajectory.reward for trajectory in group.trajectories}) > 1:
            return "keep"
        self._uniform += 1
        if self._uniform <= self.limit:
            return "refuse"
        return "limit reached" if self._uniform == self.limit + 1 else "keep"

    def step_made(self) -> None:
        """Count anew."""
        self._uniform = 0

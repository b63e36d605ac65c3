"""What becomes of a prompt that is not trained, in one word: the words of the report of accounts."""

from __future__ import annotations

from laminar.observability.events import GroupDropped
from laminar.trajectory import TrajectoryState

FAILED, FILTERED, EVICTED, LEFT = "failed", "filtered", "evicted", "left"


def fate_of(event: GroupDropped) -> str:
    """failed: a member has no valid reward; filtered: its rewards teach nothing (dynamic sampling); left: the data ended before
    they filled a step; evicted: the buffer's rules.
    """
    if event.resampled:
        return FILTERED
    if any(trajectory.state is TrajectoryState.FAILED for trajectory in event.group.trajectories):
        return FAILED
    if all(trajectory.state is TrajectoryState.TRAINING for trajectory in event.group.trajectories):
        return LEFT
    return EVICTED

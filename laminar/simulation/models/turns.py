"""Turns of modelled trajectories: each tool call of the workload ends one, and an observation of a fixed size follows.

Invariant: rollouts, environments and the checks all go by this; where a turn ends depends on the workload alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from laminar.simulation.models.workload import Workload

OBSERVATION_TOKEN = 1 << 30  # the ids of generated tokens are versions, and never so large
OBSERVATION: NDArray[np.int32] = np.full(3, OBSERVATION_TOKEN, np.int32)
NOTHING: NDArray[np.int32] = np.empty(0, np.int32)


def end_of_turn(workload: Workload, prompt_id: int, member: int, done: int) -> tuple[int, bool]:
    """Response tokens, observations included, at which the turn ends that goes on after `done` tokens; and whether it is cut.

    A turn that is complete, and not answered yet, ends where it is.
    """
    calls = workload.pauses(prompt_id, member)
    for index, (tokens, _) in enumerate(calls):
        end = tokens + index * len(OBSERVATION)
        if end >= done:
            return end, False
    return (
        workload.response_tokens(prompt_id, member) + len(calls) * len(OBSERVATION),
        workload.was_cut(prompt_id, member),
    )


def whole_response(
    workload: Workload, prompt_id: int, member: int, *, max_tokens: int, max_turns: int
) -> tuple[int, list[tuple[int, int]]]:
    """Tokens of the complete response, and where its observations are."""
    observations: list[tuple[int, int]] = []
    for index, (tokens, _) in enumerate(workload.pauses(prompt_id, member)):
        end = tokens + index * len(OBSERVATION)
        if end >= max_tokens:
            return max_tokens, observations
        if index + 1 == max_turns or end + len(OBSERVATION) >= max_tokens:
            return end, observations
        observations.append((end, end + len(OBSERVATION)))
    total = workload.response_tokens(prompt_id, member) + len(observations) * len(OBSERVATION)
    return min(total, max_tokens), observations

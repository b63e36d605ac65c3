"""The batch of a step as the flat arrays of `TrainStep`.

The three large ones are written into the same memory for every step: a batch of thousands of long trajectories takes
hundreds of megabytes, and fresh memory costs more than the copy into it. So a message is good until the next one is made,
and the next one is made only when every rank has answered the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from laminar.protocol.messages import TrainStep
from laminar.trajectory import Group, Trajectory

Number = TypeVar("Number", np.int32, np.float32)


class BatchArrays:
    """Makes the messages of one run, one after the other."""

    def __init__(self) -> None:
        self._token_ids = np.empty(0, np.int32)
        self._logprobs = np.empty(0, np.float32)
        self._loss_mask = np.empty(0, np.uint8)
        self._masked: list[tuple[int, int]] = []  # ranges of it that are 0

    def message(
        self,
        groups: Sequence[Group],
        *,
        order: int,
        step: int,
        part: int,
        mini_batches: int,
        publish_version: int | None,
    ) -> TrainStep:
        """Trajectories of a group stand together, in the order of `groups`; ends the use of the message before."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        prompt_lengths = [len(trajectory.prompt.token_ids) for trajectory in trajectories]
        lengths = [trajectory.num_tokens for trajectory in trajectories]
        responses, total = sum(lengths), sum(prompt_lengths) + sum(lengths)
        if len(self._token_ids) < total:
            self._token_ids = np.empty(total + total // 8, np.int32)
            self._logprobs = np.empty(total + total // 8, np.float32)
            self._loss_mask = np.ones(total + total // 8, np.uint8)
            self._masked = []
        pieces = [piece for t in trajectories for piece in (t.prompt.token_ids, *t.token_ids)]
        return TrainStep(
            order=order,
            step=step,
            part=part,
            mini_batches=mini_batches,
            publish_version=publish_version,
            group_ids=np.array([trajectory.group_id for trajectory in trajectories], np.int64),
            rewards=np.array([trajectory.reward for trajectory in trajectories], np.float32),
            prompt_lengths=np.array(prompt_lengths, np.int32),
            response_lengths=np.array(lengths, np.int32),
            token_ids=_joined(pieces, self._token_ids[:total]),
            loss_mask=self._mask(trajectories, responses),
            engine_logprobs=_joined([piece for t in trajectories for piece in t.logprobs], self._logprobs[:responses]),
            staleness=np.array([trajectory.staleness for trajectory in trajectories], np.int32),
        )

    def _mask(self, trajectories: Sequence[Trajectory], responses: int) -> NDArray[np.uint8]:
        """uint8 [responses]: 0 where an environment wrote the token."""
        for start, end in self._masked:
            self._loss_mask[start:end] = 1
        self._masked = []
        offset = 0
        for trajectory in trajectories:
            self._masked += [(offset + start, offset + end) for start, end in trajectory.observations()]
            offset += trajectory.num_tokens
        for start, end in self._masked:
            self._loss_mask[start:end] = 0
        return self._loss_mask[:responses]


def _joined(pieces: list[NDArray[Number]], out: NDArray[Number]) -> NDArray[Number]:
    return np.concatenate(pieces, out=out) if pieces else out

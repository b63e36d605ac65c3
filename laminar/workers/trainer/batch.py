"""The trajectories of one step: checked once, then cut into padded micro-batches.

Invariant: only tokens with loss_mask 1 become targets, each in exactly one micro-batch of one rank; a micro-batch is
padded to its own longest row and no further.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from laminar.algorithms.advantages import check_rewards
from laminar.algorithms.aggregation import Aggregation, token_weights
from laminar.algorithms.batching import pack_micro_batches, split_mini_batches, split_ranks
from laminar.errors import RunFailed
from laminar.protocol.messages import TrainStep


@dataclass(kw_only=True, slots=True, frozen=True)
class MicroBatch:
    """One forward and backward pass on one rank. N tokens are scored."""

    token_ids: torch.Tensor  # int64 [B, L], padded on the right
    positions: torch.Tensor  # int64 [N]: index into B * L of the position whose logits predict the token
    targets: torch.Tensor  # int64 [N]
    loss_mask: torch.Tensor  # bool [N]; all true, except for the one token of a dummy
    trajectories: (
        torch.Tensor
    )  # int64 [N]: the trajectory that a token belongs to, numbered from 0 among those with loss tokens
    places: torch.Tensor  # int64 [N]: where the tokens stand among the step's T response tokens
    engine_logprobs: torch.Tensor  # float32 [N]
    tokens: int  # prompt and response tokens, padding not counted

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        return MicroBatch(
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            targets=self.targets.to(device),
            loss_mask=self.loss_mask.to(device),
            trajectories=self.trajectories.to(device),
            places=self.places.to(device),
            engine_logprobs=self.engine_logprobs.to(device),
            tokens=self.tokens,
        )


class StepBatch:
    """All N trajectories of a `TrainStep`, with T response tokens."""

    def __init__(self, message: TrainStep) -> None:
        """Check the batch.

        Raises:
            RunFailed: a reward or an engine logprob is not finite, or the arrays do not fit each other; names the step.
        """
        self.message = message
        self.prompt_lengths = message.prompt_lengths.astype(np.int64)  # [N]
        self.response_lengths = message.response_lengths.astype(np.int64)  # [N]
        self.lengths = self.prompt_lengths + self.response_lengths  # [N]
        self.token_starts = _starts(self.lengths)  # [N]
        self.response_starts = _starts(self.response_lengths)  # [N]
        self.in_loss = message.loss_mask.astype(bool)  # [sum of response lengths]
        self._check()
        try:
            check_rewards(message.rewards.astype(np.float64), message.group_ids)
        except ValueError as error:
            raise RunFailed(f"step {message.step}: {error}") from error

    def mini_batches(self, number: int) -> list[list[int]]:
        """Rows of each mini-batch, whole groups together; fewer mini-batches when there are fewer groups."""
        group_ids = self.message.group_ids.tolist()
        return split_mini_batches(self.lengths.tolist(), min(number, len(set(group_ids))), group_ids=group_ids)

    def loss_tokens(self, rows: list[int]) -> NDArray[np.int64]:  # int64 [rows]
        """Tokens of each of these rows that the loss counts."""
        return np.array([self.in_loss[self._response(row)].sum() for row in rows], np.int64)

    def token_weights(
        self, mini_batches: list[list[int]], *, aggregation: Aggregation, max_response_tokens: int
    ) -> NDArray[np.float32]:  # float32 [T]
        """What each response token weighs in the loss of its mini-batch."""
        weights = np.zeros(len(self.lengths), np.float64)
        for rows in mini_batches:
            weights[rows] = token_weights(
                self.loss_tokens(rows), aggregation=aggregation, max_response_tokens=max_response_tokens
            )
        return np.repeat(weights, self.response_lengths).astype(np.float32)

    def share(self, rows: list[int], rank: int, ranks: int) -> list[int]:
        """The rows that one rank takes, balanced by tokens."""
        return [rows[index] for index in split_ranks(self.lengths[rows].tolist(), ranks)[rank]]

    def pack(self, rows: list[int], max_tokens: int, at_least: int = 1) -> list[list[int]]:
        """Micro-batches of at most `max_tokens` padded tokens; a row longer than that makes one alone.

        The last ones are empty when `at_least` asks for more than there are rows.
        """
        lengths = self.lengths[rows].tolist()
        budget = max([max_tokens, *lengths])
        return [
            [rows[index] for index in indices] for indices in pack_micro_batches(lengths, budget, at_least=at_least)
        ]

    def best_number(self, rows: list[int], max_tokens: int, pass_cost: int) -> int:
        """Number of micro-batches for which padded tokens, and `pass_cost` tokens for each pass, sum up to least.

        Rows of widely varying length pad less in more and smaller micro-batches. Tried are the smallest number that the
        budget allows and its doubles.
        """
        best, least = 0, math.inf
        packed = self.pack(rows, max_tokens)
        while len(packed) <= len(rows):
            cost = sum(len(own) * int(self.lengths[own].max()) + pass_cost for own in packed)
            if cost >= least:
                break
            best, least = len(packed), cost
            packed = self.pack(rows, max_tokens, at_least=2 * len(packed))
        return best

    def micro_batch(self, rows: list[int]) -> MicroBatch:
        """These rows, padded. Without rows: a dummy pass of two tokens, none of which is in the loss."""
        if not rows:
            return _dummy()
        width = int(self.lengths[rows].max())
        token_ids = np.zeros((len(rows), width), np.int64)
        positions, targets, trajectories, places = [], [], [], []
        number = 0
        for index, row in enumerate(rows):
            prompt, start = int(self.prompt_lengths[row]), int(self.token_starts[row])
            tokens = self.message.token_ids[start : start + int(self.lengths[row])]
            token_ids[index, : len(tokens)] = tokens
            chosen = np.flatnonzero(self.in_loss[self._response(row)])
            # The logits at a position predict the token after it.
            positions.append(index * width + prompt - 1 + chosen)
            targets.append(tokens[prompt + chosen])
            trajectories.append(np.full(len(chosen), number))
            number += len(chosen) > 0
            places.append(int(self.response_starts[row]) + chosen)
        flat_positions = np.concatenate(positions)
        if not len(flat_positions):
            return _dummy()
        flat_places = np.concatenate(places)
        return MicroBatch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(flat_positions),
            targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
            loss_mask=torch.ones(len(flat_positions), dtype=torch.bool),
            trajectories=torch.from_numpy(np.concatenate(trajectories)),
            places=torch.from_numpy(flat_places),
            engine_logprobs=torch.from_numpy(self.message.engine_logprobs[flat_places].astype(np.float32)),
            tokens=int(self.lengths[rows].sum()),
        )

    def _response(self, row: int) -> slice:
        """Where the row's response lies in arrays over all responses."""
        start = int(self.response_starts[row])
        return slice(start, start + int(self.response_lengths[row]))

    def _check(self) -> None:
        message = self.message
        step = f"step {message.step}"
        rows = {
            len(array) for array in (message.group_ids, message.rewards, self.prompt_lengths, self.response_lengths)
        }
        responses = int(self.response_lengths.sum())
        if (
            len(rows) != 1
            or not len(self.lengths)
            or len(message.token_ids) != int(self.lengths.sum())
            or len(message.loss_mask) != responses
            or len(message.engine_logprobs) != responses
        ):
            raise RunFailed(f"{step}: the arrays of the batch do not fit each other, or it is empty")
        if self.prompt_lengths.min() < 1:
            raise RunFailed(f"{step}: trajectory {int(self.prompt_lengths.argmin())} of the batch has an empty prompt")
        bad = np.flatnonzero(self.in_loss & ~np.isfinite(message.engine_logprobs))
        if len(bad):
            row = int(np.searchsorted(self.response_starts, bad[0], side="right")) - 1
            raise RunFailed(
                f"{step}: engine_logprobs is not finite ({message.engine_logprobs[bad[0]]}) in trajectory {row} of the "
                f"batch (group {message.group_ids[row]}), token {bad[0] - self.response_starts[row]} of its response; "
                f"{len(bad)} such tokens. Nothing was updated"
            )


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths) - lengths


def _dummy() -> MicroBatch:
    """Keeps a rank in step with the others' collectives; adds exact zeros to the gradient."""
    return MicroBatch(
        token_ids=torch.zeros((1, 2), dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        targets=torch.zeros(1, dtype=torch.int64),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        trajectories=torch.zeros(1, dtype=torch.int64),
        places=torch.zeros(1, dtype=torch.int64),
        engine_logprobs=torch.zeros(1),
        tokens=0,
    )

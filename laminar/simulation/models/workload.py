"""What there is to generate: for every prompt its length, and for every member of its group the length and the tool calls.

Invariant: the answer depends on (seed, prompt_id, member) alone, never on who asks, when, or in which order. Prompts are drawn
in blocks, each from a generator of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from laminar.errors import UserError
from laminar.simulation.models.lengths import NORMAL_P99, Growth, Lengths, cut

BLOCK = 512  # prompts drawn at once
CACHED_BLOCKS = 64

Pauses = tuple[tuple[int, float], ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolCalls:
    """Tool calls of a multi-turn trajectory, spread evenly over its response; latencies are log-normal."""

    minimum: int  # calls per trajectory: uniform between the two, both included
    maximum: int
    latency_median_s: float
    latency_p99_s: float
    latency_limit_s: float  # a call that takes longer is given up then

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise UserError(
                f"tools: minimum {self.minimum}, maximum {self.maximum}; expected 0 <= minimum <= maximum calls per trajectory"
            )
        if not 0 < self.latency_median_s <= self.latency_p99_s < math.inf:
            raise UserError(
                f"tools: latency_median_s {self.latency_median_s}, latency_p99_s {self.latency_p99_s}; expected seconds, "
                "the median above 0 and not above the 99th percentile"
            )
        if not self.latency_limit_s > 0:
            raise UserError(f"tools.latency_limit_s: {self.latency_limit_s}; expected seconds above 0")


@dataclass(slots=True, frozen=True)
class _Block:
    prompts: list[int]  # [BLOCK] tokens
    responses: list[list[int]]  # [BLOCK][group_size] tokens
    was_cut: list[list[bool]]  # [BLOCK][group_size]
    calls: list[list[int]]  # [BLOCK][group_size], empty without tools
    latencies: list[list[list[float]]]  # [BLOCK][group_size][tools.maximum] seconds


class Workload:
    """Lengths and tool calls of a data set that never ends."""

    def __init__(
        self,
        *,
        lengths: Lengths,
        prompt_lengths: Lengths | int,
        group_size: int,
        groups_per_step: int,
        seed: int,
        tools: ToolCalls | None = None,
        growth: Growth | None = None,
        group_correlation: float = 0.0,
    ) -> None:
        """Describe the workload; nothing is drawn yet.

        Args:
            prompt_lengths: a distribution, or the same for all, in tokens.
            groups_per_step: prompt i counts as one of step i // groups_per_step, which `growth` goes by.
            group_correlation: share of the variance of (log) length that the members of a group have in common, because prompts
                differ in difficulty; 0, the default, makes all trajectories independent.

        Raises:
            UserError: a value is out of its range.
        """
        for name, value in (("group_size", group_size), ("groups_per_step", groups_per_step)):
            if value < 1:
                raise UserError(f"workload.{name}: {value}; expected 1 at least")
        if seed < 0:
            raise UserError(f"workload.seed: {seed}; expected 0 or more")
        if not 0 <= group_correlation <= 1:
            raise UserError(f"workload.group_correlation: {group_correlation}; expected a share from 0 to 1")
        if isinstance(prompt_lengths, int) and prompt_lengths < 1:
            raise UserError(f"workload.prompt_lengths: {prompt_lengths}; expected a number of tokens, 1 at least")
        self.group_size = group_size
        self.groups_per_step = groups_per_step
        self._lengths = lengths
        self._prompt_lengths = prompt_lengths
        self._seed = seed
        self._tools = tools
        self._growth = growth or Growth()
        self._correlation = group_correlation
        self._blocks: dict[int, _Block] = {}

    @property
    def max_prompt_tokens(self) -> int:
        """The longest that a prompt can be."""
        return self._prompt_lengths if isinstance(self._prompt_lengths, int) else self._prompt_lengths.maximum

    @property
    def max_response_tokens(self) -> int:
        """The longest that a response can be."""
        return self._lengths.maximum

    def prompt_tokens(self, prompt_id: int) -> int:
        """Length of a prompt."""
        return self._block(prompt_id).prompts[prompt_id % BLOCK]

    def response_tokens(self, prompt_id: int, member: int) -> int:
        """Length of a response, at most `max_response_tokens`."""
        return self._block(prompt_id).responses[prompt_id % BLOCK][member]

    def was_cut(self, prompt_id: int, member: int) -> bool:
        """The response would have been longer: its finish reason is "length", not "stop"."""
        return self._block(prompt_id).was_cut[prompt_id % BLOCK][member]

    def pauses(self, prompt_id: int, member: int) -> Pauses:
        """Tool calls as (after this many response tokens, seconds), ascending; always within the response."""
        if self._tools is None:
            return ()
        block, row = self._block(prompt_id), prompt_id % BLOCK
        tokens = block.responses[row][member]
        calls = min(block.calls[row][member], tokens - 1)
        latencies = block.latencies[row][member]
        return tuple(((call + 1) * tokens // (calls + 1), latencies[call]) for call in range(calls))

    def _block(self, prompt_id: int) -> _Block:
        number = prompt_id // BLOCK
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) >= CACHED_BLOCKS:
                del self._blocks[next(iter(self._blocks))]  # the oldest; it can be drawn again
            block = self._blocks[number] = self._draw(number)
        return block

    def _draw(self, number: int) -> _Block:
        shape = (BLOCK, self.group_size)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self._seed, number))))
        prompt_normal = rng.standard_normal(BLOCK)  # drawn even when unused: responses do not depend on prompt_lengths
        shared, own = rng.standard_normal((BLOCK, 1)), rng.standard_normal(shape)
        normal = math.sqrt(self._correlation) * shared + math.sqrt(1 - self._correlation) * own
        steps_before = (number * BLOCK + np.arange(BLOCK)) // self.groups_per_step
        uncut = self._lengths.uncut(normal) * self._growth.factor(steps_before)[:, None]
        if isinstance(self._prompt_lengths, int):
            prompts = [self._prompt_lengths] * BLOCK
        else:
            prompts = cut(self._prompt_lengths, self._prompt_lengths.uncut(prompt_normal)).tolist()
        calls: list[list[int]] = []
        latencies: list[list[list[float]]] = []
        if self._tools is not None:
            tools = self._tools
            calls = rng.integers(tools.minimum, tools.maximum, shape, endpoint=True).tolist()
            sigma = math.log(tools.latency_p99_s / tools.latency_median_s) / NORMAL_P99
            seconds = tools.latency_median_s * np.exp(sigma * rng.standard_normal((*shape, tools.maximum)))
            latencies = np.minimum(seconds, tools.latency_limit_s).tolist()
        return _Block(
            prompts=prompts,
            responses=cut(self._lengths, uncut).tolist(),
            was_cut=(np.rint(uncut) > self._lengths.maximum).tolist(),
            calls=calls,
            latencies=latencies,
        )

"""Which rollouts to empty into which others: repack by best fit (the paper, section 5, Algorithm 1) as a pure function.

Invariants of a plan: trajectories move within one policy version only; every source is emptied by exactly one move; no
rollout both gives and receives; no target exceeds the KV ceiling or the batch bound, all its merges counted; no move costs more
than it frees, and no more rollouts are freed than are wanted. The same observations give the same plan, in whatever order they come.

What a move frees is the time that its source would have needed to drain, in seconds of a rollout; what it costs is the time that
its target spends on the moved context, prefilling it again or taking in its KV, in which it decodes nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 32  # entries of a block of `_BestFit`; of no influence on the plan


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutObservation:
    """Load of one rollout at two successive checks."""

    rollout: str
    policy_version: int
    running: int  # trajectories in its batch, those that wait for a tool included
    waiting: int  # trajectories queued inside the engine
    kv_utilization: float  # 0 to 1
    previous_kv_utilization: float  # 0 to 1
    previous_running: int
    draining: bool  # it takes no new prompts until it is empty: only then is emptying it useful
    tensor_parallel: int = 1  # rollouts of another degree have another KV cache, and none of their trajectories
    context_tokens: int = 0  # prompts and responses of its trajectories: what a move carries, or prefills again
    drains_in_s: float | None = None  # as estimated; None: not known yet

    @property
    def requests(self) -> int:
        """Unfinished trajectories on it."""
        return self.running + self.waiting


@dataclass(kw_only=True, slots=True, frozen=True)
class RepackBounds:
    """What no target may exceed, and what no plan may."""

    kv_ceiling: float  # C_max, 0 to 1
    batch_bound: int  # B: below it decoding is bound by memory, so that a larger batch costs no latency
    move_s_per_token: float = 0.0  # that a target spends on a moved token of context; 0: not measured yet
    wanted: int | None = None  # rollouts that are worth freeing at most; None: all
    why_no_more: str = ""  # reason for those beyond


@dataclass(kw_only=True, slots=True, frozen=True)
class Move:
    """All unfinished trajectories of the source go to the target."""

    source: str
    target: str
    context_tokens: int = 0
    frees_s: float | None = None  # seconds of a rollout, as estimated; None: not known
    costs_s: float | None = None  # likewise


@dataclass(kw_only=True, slots=True, frozen=True)
class RepackPlan:
    """The moves, in the order in which they were planned, and for every other rollout why it is not emptied."""

    moves: tuple[Move, ...]
    reasons: dict[str, str]  # rollout -> one line for a person


def plan(observations: Sequence[RolloutObservation], bounds: RepackBounds) -> RepackPlan:
    """Consolidate the rollouts that are past their peak, per policy version.

    KV utilizations are added up, so rollouts of one degree must have KV caches of one size. O(n sqrt n) for n rollouts.
    """
    moves: list[Move] = []
    reasons: dict[str, str] = {}
    groups: dict[tuple[int, int], list[RolloutObservation]] = {}
    for observation in sorted(observations, key=lambda each: (each.policy_version, each.kv_utilization, each.rollout)):
        busy = _why_no_candidate(observation, bounds)
        if busy:
            reasons[observation.rollout] = busy
        else:
            groups.setdefault((observation.policy_version, observation.tensor_parallel), []).append(observation)
    for candidates in groups.values():
        _consolidate(candidates, bounds, moves, reasons)
    return RepackPlan(moves=tuple(moves), reasons=reasons)


def _why_no_candidate(observation: RolloutObservation, bounds: RepackBounds) -> str:
    """Why a rollout takes no part, as source or as target; empty if it is past its peak and below both bounds."""
    if not observation.running:
        return "no trajectory runs on it"
    if observation.kv_utilization >= bounds.kv_ceiling:
        return f"its KV utilization {observation.kv_utilization:.2f} is at the ceiling {bounds.kv_ceiling:.2f}"
    if observation.requests >= bounds.batch_bound:
        return f"its {observation.requests} trajectories fill the batch bound {bounds.batch_bound}"
    falling = observation.kv_utilization < observation.previous_kv_utilization
    # The KV of a long straggler only grows: it would never fall, though its rollout is all but idle.
    stragglers = observation.waiting == 0 and observation.running <= observation.previous_running
    if not (falling or stragglers):
        return "its load still grows"
    return ""


def _consolidate(
    candidates: list[RolloutObservation], bounds: RepackBounds, moves: list[Move], reasons: dict[str, str]
) -> None:
    """Best fit within one version; `candidates` in ascending order of KV utilization, then name."""
    fit = _BestFit(candidates, bounds)
    received: set[int] = set()
    for rank, source in enumerate(candidates):
        if rank in received:
            continue
        if why_not := _why_no_source(source, bounds, len(moves)):
            reasons[source.rollout] = why_not
        elif (target := fit.merge(rank)) is None:
            reasons[source.rollout] = _why_no_target(source, candidates)
        else:
            received.add(target)
            moves.append(
                Move(
                    source=source.rollout,
                    target=candidates[target].rollout,
                    context_tokens=source.context_tokens,
                    frees_s=source.drains_in_s,
                    costs_s=bounds.move_s_per_token * source.context_tokens or None,
                )
            )
    for rank in received:  # those included that came before their source in the order
        reasons[candidates[rank].rollout] = "it takes in others"


def _why_no_source(source: RolloutObservation, bounds: RepackBounds, planned: int) -> str:
    """Why a candidate is not emptied, wherever its trajectories could go; empty if it may be."""
    if not source.draining:
        return "it takes new prompts, so emptying it frees nothing"
    if bounds.wanted is not None and planned >= bounds.wanted:
        return bounds.why_no_more
    costs_s = bounds.move_s_per_token * source.context_tokens
    if source.drains_in_s is not None and costs_s >= source.drains_in_s and costs_s > 0:
        return (
            f"moving its {source.context_tokens} tokens of context costs the target {costs_s:.2g} s, and it drains in "
            f"{source.drains_in_s:.2g} s by itself"
        )
    return ""


def _why_no_target(source: RolloutObservation, candidates: Sequence[RolloutObservation]) -> str:
    others = len(candidates) - 1
    if not others:
        return f"no other rollout of version {source.policy_version} is past its peak"
    return f"none of the {others} others of version {source.policy_version} has room for its trajectories below both bounds"


class _BestFit:
    """Candidates in ascending order of projected KV, in blocks that know their fewest requests.

    A candidate is known by its rank. An entry is (projected KV, -rank): among equals the first one in order fits best.
    """

    def __init__(self, candidates: Sequence[RolloutObservation], bounds: RepackBounds) -> None:
        self._bounds = bounds
        self._kv = [candidate.kv_utilization for candidate in candidates]
        self._requests = [candidate.requests for candidate in candidates]
        entries = sorted((kv, -rank) for rank, kv in enumerate(self._kv))
        self._blocks = [entries[start : start + BLOCK] for start in range(0, len(entries), BLOCK)]
        self._fewest = [self._fewest_of(block) for block in self._blocks]

    def merge(self, source: int) -> int | None:
        """Empty `source` into the fullest candidate that can take it, and return that; None if there is none.

        Either way `source` is no candidate afterwards: where none can take it, it can take none of those left.
        """
        self._remove(source)
        target = self._find(self._kv[source], self._requests[source])
        if target is None:
            return None
        self._remove(target)
        self._kv[target] += self._kv[source]
        self._requests[target] += self._requests[source]
        self._insert(target)
        return target

    def _find(self, kv: float, requests: int) -> int | None:
        ceiling, most = self._bounds.kv_ceiling, self._bounds.batch_bound - requests
        # Rounded addition is monotonic, so bisection by the very sum that must hold finds the border exactly.
        last = bisect_right(self._blocks, ceiling, key=lambda block: block[0][0] + kv) - 1
        for number in range(last, -1, -1):
            if self._fewest[number] > most:
                continue
            block = self._blocks[number]
            end = bisect_right(block, ceiling, key=lambda entry: entry[0] + kv) if number == last else len(block)
            for _, negative_rank in reversed(block[:end]):
                if self._requests[-negative_rank] <= most:
                    return -negative_rank
        return None

    def _remove(self, rank: int) -> None:
        entry = (self._kv[rank], -rank)
        number = bisect_right(self._blocks, entry, key=_first) - 1
        block = self._blocks[number]
        del block[bisect_left(block, entry)]
        if not block:
            del self._blocks[number], self._fewest[number]
        elif self._requests[rank] == self._fewest[number]:
            self._fewest[number] = self._fewest_of(block)

    def _insert(self, rank: int) -> None:
        entry = (self._kv[rank], -rank)
        if not self._blocks:
            self._blocks, self._fewest = [[entry]], [self._requests[rank]]
            return
        number = max(bisect_right(self._blocks, entry, key=_first) - 1, 0)
        block = self._blocks[number]
        insort(block, entry)
        self._fewest[number] = min(self._fewest[number], self._requests[rank])
        if len(block) > 2 * BLOCK:
            self._blocks[number : number + 1] = halves = [block[:BLOCK], block[BLOCK:]]
            self._fewest[number : number + 1] = [self._fewest_of(half) for half in halves]

    def _fewest_of(self, block: list[tuple[float, int]]) -> int:
        return min([self._requests[-negative_rank] for _, negative_rank in block])


def _first(block: list[tuple[float, int]]) -> tuple[float, int]:
    return block[0]

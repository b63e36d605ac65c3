"""How a batch is divided: over ranks, into mini-batches, into micro-batches. Pure Python, deterministic.

Invariant: in every division each index occurs exactly once; nothing is dropped, repeated or padded in.
Lengths are tokens of whole trajectories (prompt and response).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence


def split_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for every rank, so that the ranks' token totals are close (largest differencing method).

    Every rank gets at least one index when there are as many as ranks; with fewer, the last ranks get none.

    Source: Karmarkar and Karp 1982, in the multi-way form of Korf 2009, "Multi-way number partitioning".

    Raises ValueError for a length below 1 (naming its index) and for `ranks` below 1.
    """
    _check_lengths(lengths)
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1; it is {ranks}")
    # A partial solution is its parts, largest first, with (tokens, indices). Joining the two most uneven solutions,
    # largest part with smallest, commits to "these do not go together" and leaves the choice of where for later.
    Parts = list[tuple[int, list[int]]]
    solutions: list[tuple[int, int, Parts]] = [
        (-length, index, [(length, [index])] + [(0, [])] * (ranks - 1)) for index, length in enumerate(lengths)
    ]
    heapq.heapify(solutions)
    while len(solutions) > 1:
        _, first_index, first = heapq.heappop(solutions)
        _, _, second = heapq.heappop(solutions)
        joined = [
            (tokens + other_tokens, indices + other_indices)
            for (tokens, indices), (other_tokens, other_indices) in zip(first, reversed(second), strict=True)
        ]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(solutions, (joined[-1][0] - joined[0][0], first_index, joined))
    if not solutions:
        return [[] for _ in range(ranks)]
    return [sorted(indices) for _, indices in solutions[0][2]]


def split_mini_batches(
    lengths: Sequence[int], number: int, *, group_ids: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Indices of `number` mini-batches (one optimizer step each).

    Their sizes, in trajectories, differ by at most one, and their token totals are close: each has its share of the
    long tail. With `group_ids` whole groups stay together, and it is the number of groups that differs by at most one.

    Raises ValueError for a length below 1 (naming its index), for `number` below 1 or above the number of trajectories
    (groups), and for `group_ids` of another length.
    """
    _check_lengths(lengths)
    if group_ids is None:
        units = [[index] for index in range(len(lengths))]
    else:
        if len(group_ids) != len(lengths):
            raise ValueError(f"{len(group_ids)} group_ids for {len(lengths)} lengths")
        members: dict[Hashable, list[int]] = {}
        for index, group_id in enumerate(group_ids):
            members.setdefault(group_id, []).append(index)
        units = list(members.values())
    if not 1 <= number <= len(units):
        kind = "trajectories" if group_ids is None else "groups"
        raise ValueError(f"{len(units)} {kind} cannot be split into {number} mini-batches")

    def tokens(unit: list[int]) -> int:
        return sum(lengths[index] for index in unit)

    units.sort(key=lambda unit: (-tokens(unit), unit))
    totals = [0] * number
    mini_batches: list[list[int]] = [[] for _ in range(number)]
    # In rounds of one unit each, the largest of the round to the mini-batch that has the fewest tokens.
    for start in range(0, len(units), number):
        order = sorted(range(number), key=lambda index: (totals[index], index))
        for index, unit in zip(order, units[start : start + number], strict=False):
            totals[index] += tokens(unit)
            mini_batches[index].extend(unit)
    return [sorted(mini_batch) for mini_batch in mini_batches]


def pack_micro_batches(lengths: Sequence[int], max_tokens: int, *, at_least: int = 1) -> list[list[int]]:
    """Indices of micro-batches (one forward and backward pass each) within a token budget.

    The cost of a micro-batch is what it takes once padded: rows * longest row, at most `max_tokens`. As few
    micro-batches as the budget allows, and for that number the smallest possible largest cost; rows of similar length
    lie together. The longest rows come first, so that a step that does not fit in memory fails at once.

    `at_least` asks for more micro-batches than the budget needs: ranks that run collectives in every pass must all run
    as many as the rank with most. With fewer rows than that, the last micro-batches are empty lists (the caller runs a
    pass whose loss mask is empty).

    Raises ValueError for a length below 1 or above `max_tokens` (naming the row).
    """
    _check_lengths(lengths)
    rows = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if rows and lengths[rows[0]] > max_tokens:
        raise ValueError(
            f"row {rows[0]} has {lengths[rows[0]]} tokens, more than a micro-batch may hold (max_tokens = {max_tokens})"
        )
    number = max(at_least, len(_fill(lengths, rows, max_tokens)))
    # Least budget that needs no more micro-batches: that evens them out.
    low, high = (lengths[rows[0]] if rows else 0), max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_fill(lengths, rows, middle)) <= number:
            high = middle
        else:
            low = middle + 1
    micro_batches = _fill(lengths, rows, high)
    while len(micro_batches) < number and any(len(micro_batch) > 1 for micro_batch in micro_batches):
        costs = [len(own) * lengths[own[0]] if len(own) > 1 else 0 for own in micro_batches]
        costliest = costs.index(max(costs))
        whole = micro_batches[costliest]
        half = (len(whole) + 1) // 2
        micro_batches[costliest : costliest + 1] = [whole[:half], whole[half:]]
    packed = [sorted(micro_batch) for micro_batch in micro_batches]
    return packed + [[] for _ in range(at_least - len(packed))]


def _fill(lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[list[int]]:
    """Cut `rows` (longest first) into the fewest micro-batches of rows * longest <= budget."""
    micro_batches: list[list[int]] = []
    for row in rows:
        if micro_batches and (len(micro_batches[-1]) + 1) * lengths[micro_batches[-1][0]] <= budget:
            micro_batches[-1].append(row)
        else:
            micro_batches.append([row])
    return micro_batches


def _check_lengths(lengths: Sequence[int]) -> None:
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"row {index} has length {length}: a trajectory has at least one token")

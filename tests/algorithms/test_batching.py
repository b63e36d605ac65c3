from __future__ import annotations

import random
from itertools import pairwise

import pytest

from laminar.algorithms.batching import pack_micro_batches, split_mini_batches, split_ranks


def long_tailed(generator: random.Random, number: int, longest: int = 200) -> list[int]:
    return [min(longest, 1 + int(generator.paretovariate(1.1) * 5)) for _ in range(number)]


def indices(parts: list[list[int]]) -> list[int]:
    return sorted(index for part in parts for index in part)


def tokens(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[index] for index in part) for part in parts]


def cost(lengths: list[int], rows: list[int]) -> int:
    return len(rows) * max((lengths[row] for row in rows), default=0)


def partitions(items: list[int]):
    """Every division of `items` into non-empty parts."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for index, part in enumerate(parts):
            yield [*parts[:index], [first, *part], *parts[index + 1 :]]


# Micro-batches


def test_micro_batches_by_hand():
    # 100 alone; 40 and 40 pad to nothing; 10, 10 and 5 cost 30.
    assert pack_micro_batches([10, 100, 40, 5, 40, 10], 100) == [[1], [2, 4], [0, 3, 5]]


def test_micro_batches_are_evened_out():
    # Nine rows of 10 under a budget of 80 need two; 5 and 4, rather than 8 and 1.
    assert [len(rows) for rows in pack_micro_batches([10] * 9, 80)] == [5, 4]


def test_micro_batches_keep_the_budget_and_every_row_once():
    generator = random.Random(0)
    for _ in range(300):
        lengths = long_tailed(generator, generator.randrange(1, 60))
        budget = generator.randrange(max(lengths), 4 * max(lengths))
        at_least = generator.randrange(1, 8)
        micro_batches = pack_micro_batches(lengths, budget, at_least=at_least)
        assert indices(micro_batches) == list(range(len(lengths)))
        assert max(cost(lengths, rows) for rows in micro_batches) <= budget
        assert len(micro_batches) >= at_least
        assert len(micro_batches) == max(at_least, len(pack_micro_batches(lengths, budget)))
        longest = [max(lengths[row] for row in rows) for rows in micro_batches if rows]
        assert all(before >= after for before, after in pairwise(longest))


def test_micro_batches_are_as_few_and_then_as_even_as_any_division():
    generator = random.Random(1)
    for _ in range(40):
        lengths = [generator.randrange(1, 12) for _ in range(generator.randrange(1, 7))]
        budget = generator.randrange(max(lengths), 30)
        ours = pack_micro_batches(lengths, budget)
        best = min(
            (len(parts), max(cost(lengths, part) for part in parts))
            for parts in partitions(list(range(len(lengths))))
            if all(cost(lengths, part) <= budget for part in parts)
        )
        assert (len(ours), max(cost(lengths, rows) for rows in ours)) == best


def test_more_micro_batches_than_the_budget_needs():
    assert [len(rows) for rows in pack_micro_batches([10] * 8, 80, at_least=4)] == [2, 2, 2, 2]
    assert sorted(len(rows) for rows in pack_micro_batches([10] * 4, 80, at_least=3)) == [1, 1, 2]
    # No budget gives exactly four here: the costliest of three is halved.
    assert [len(rows) for rows in pack_micro_batches([10] * 4 + [1] * 4, 100, at_least=4)] == [1, 1, 2, 4]
    assert pack_micro_batches([3, 7], 80, at_least=4) == [[1], [0], [], []]


def test_row_over_the_budget_is_named():
    with pytest.raises(ValueError, match=r"row 1 has 101 tokens.*max_tokens = 100"):
        pack_micro_batches([5, 101, 7], 100)
    assert pack_micro_batches([5, 100, 7], 100)[0] == [1]


def test_no_rows_need_no_micro_batches_unless_asked_for():
    assert pack_micro_batches([], 100, at_least=0) == []
    assert pack_micro_batches([], 100, at_least=2) == [[], []]


# Mini-batches


def test_mini_batches_by_hand():
    # Rounds (9, 8), (7, 6), (5, 4): the larger of each round to the smaller total so far.
    assert split_mini_batches([4, 5, 6, 7, 8, 9], 2) == [[1, 2, 5], [0, 3, 4]]


def test_mini_batches_are_even_in_size_and_near_even_in_tokens():
    generator = random.Random(2)
    for _ in range(100):
        number = generator.randrange(1, 8)
        lengths = long_tailed(generator, generator.randrange(number, 100))
        mini_batches = split_mini_batches(lengths, number)
        assert indices(mini_batches) == list(range(len(lengths)))
        sizes = [len(mini_batch) for mini_batch in mini_batches]
        assert max(sizes) - min(sizes) <= 1
        totals = tokens(lengths, mini_batches)
        assert max(totals) - min(totals) <= max(lengths)


def test_groups_stay_whole():
    generator = random.Random(3)
    for _ in range(50):
        number = generator.randrange(1, 5)
        group_ids = [f"g{generator.randrange(12)}" for _ in range(60)]
        mini_batches = split_mini_batches(long_tailed(generator, 60), number, group_ids=group_ids)
        assert indices(mini_batches) == list(range(60))
        groups = [{group_ids[index] for index in mini_batch} for mini_batch in mini_batches]
        assert sum(len(some) for some in groups) == len(set(group_ids))
        sizes = [len(some) for some in groups]
        assert max(sizes) - min(sizes) <= 1


def test_impossible_mini_batches_are_refused():
    with pytest.raises(ValueError, match="2 trajectories cannot be split into 3"):
        split_mini_batches([1, 1], 3)
    with pytest.raises(ValueError, match="1 groups cannot be split into 2"):
        split_mini_batches([1, 1], 2, group_ids=[5, 5])
    with pytest.raises(ValueError, match="into 0 mini-batches"):
        split_mini_batches([1, 1], 0)
    with pytest.raises(ValueError, match="1 group_ids for 2 lengths"):
        split_mini_batches([1, 1], 1, group_ids=[5])


# Ranks


def test_ranks_by_hand():
    # The textbook case: handing out the longest first, each to the emptier rank, ends at 17 and 13.
    assert sorted(tokens([8, 7, 6, 5, 4], split_ranks([8, 7, 6, 5, 4], 2))) == [14, 16]
    assert split_ranks([1000, 10, 10, 10], 2) == [[0], [1, 2, 3]]


def test_ranks_are_near_even_in_tokens_and_none_idles():
    generator = random.Random(4)
    for _ in range(200):
        ranks = generator.randrange(1, 9)
        lengths = long_tailed(generator, generator.randrange(ranks, 120))
        parts = split_ranks(lengths, ranks)
        assert len(parts) == ranks and all(parts)
        assert indices(parts) == list(range(len(lengths)))
        totals = tokens(lengths, parts)
        # The fullest rank is bounded by the longest trajectory or by the mean, whichever is more.
        assert max(totals) <= max(max(lengths), sum(lengths) / ranks + max(lengths) / 2)


def test_equal_lengths_give_equal_ranks():
    assert sorted(len(part) for part in split_ranks([10] * 10, 4)) == [2, 2, 3, 3]


def test_fewer_trajectories_than_ranks():
    parts = split_ranks([4, 9], 4)
    assert parts == [[1], [0], [], []]
    assert split_ranks([], 2) == [[], []]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        split_ranks([1], 0)
    for divide in (lambda x: split_ranks(x, 1), lambda x: split_mini_batches(x, 1), lambda x: pack_micro_batches(x, 9)):
        with pytest.raises(ValueError, match="row 1 has length 0"):
            divide([3, 0])


def test_divisions_are_deterministic():
    lengths = long_tailed(random.Random(5), 64)
    assert split_ranks(lengths, 3) == split_ranks(list(lengths), 3)
    assert pack_micro_batches(lengths, 400) == pack_micro_batches(list(lengths), 400)
    assert split_mini_batches(lengths, 4) == split_mini_batches(list(lengths), 4)

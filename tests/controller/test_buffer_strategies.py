"""Rankings of the experience buffer, the user's own among them, and eviction."""

import random
from collections import Counter

import pytest

from laminar.controller.buffer_strategies import (
    Fifo,
    Freshest,
    StalenessWeighted,
    UserStrategy,
    evictions,
    load_strategy,
)
from laminar.controller.schedules.schedule import ReadyGroup
from laminar.errors import RunFailed, UserError
from tests.run_parts import a_config


def groups(*versions):
    """Ready groups 0, 1, ... of these versions."""
    return [ReadyGroup(group_id=k, policy_version=version, completed=k) for k, version in enumerate(versions)]


def ids(ranked):
    return [group.group_id for group in ranked]


def with_strategy(strategy, **changes):
    config = a_config()
    return config.model_copy(update={"buffer": type(config.buffer)(strategy=strategy, **changes)})


def test_fifo_is_the_order_of_admission_and_freshest_that_of_versions():
    ready = groups(3, 1, 2, 3)
    random.Random(0).shuffle(ready)
    assert ids(Fifo().rank(ready, published_version=3)) == [0, 1, 2, 3]
    assert ids(Freshest().rank(ready, published_version=3)) == [0, 3, 2, 1]


def test_staleness_weighted_draws_by_half_life():
    """Two groups, one of them one half-life older: it comes first in a third of the draws."""
    ready = groups(2, 0)
    firsts = Counter(
        StalenessWeighted(half_life=2.0, seed=seed).rank(ready, published_version=2)[0].group_id for seed in range(3000)
    )
    assert firsts[1] / 3000 == pytest.approx(1 / 3, abs=0.03)


def test_staleness_weighted_repeats_itself_but_not_from_version_to_version():
    ready = groups(*[0] * 50)
    orders = [
        ids(StalenessWeighted(half_life=1.0, seed=seed).rank(some, published_version=version))
        for seed, version, some in ((7, 0, ready), (7, 0, ready[::-1]), (7, 1, ready), (8, 0, ready), (-7, 0, ready))
    ]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_staleness_weighted_bears_weights_too_small_for_a_float():
    ready = groups(0, 10_000, 5_000)
    ranked = StalenessWeighted(half_life=0.01, seed=0).rank(ready, published_version=10_000)
    assert ids(ranked) == [1, 2, 0]


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Writes a module of the user's into the working directory; returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        name = f"own_strategies_of_{tmp_path.name}"  # one that no other test has imported
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_a_function_of_the_users_ranks(own_module):
    name = own_module("def backwards(ready, *, published_version):\n    return ready[::-1]\n")
    strategy = load_strategy(with_strategy(f"{name}:backwards"))
    assert ids(strategy.rank(groups(0, 0, 0), published_version=0)) == [2, 1, 0]


def test_a_class_of_the_users_is_made_with_the_config(own_module):
    name = own_module(
        "class Own:\n"
        "    def __init__(self, config):\n"
        "        self.first = config.seed\n"
        "    def rank(self, ready, published_version):\n"
        "        return [group for group in ready if group.group_id == self.first]\n"
    )
    config = with_strategy(f"{name}:Own").model_copy(update={"seed": 2})
    assert ids(load_strategy(config).rank(groups(0, 0, 0), published_version=0)) == [2, 0, 1]


@pytest.mark.parametrize(
    "returned, complaint",
    [
        (lambda ready: [ready[0], ready[0]], "comes twice"),
        (lambda ready: groups(0, 9), "not one of the ready groups"),
        (lambda ready: [0], "returned 0"),
        (lambda ready: None, "TypeError"),
        (lambda ready: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_ranking_that_is_none_ends_the_run_and_names_the_strategy(returned, complaint):
    strategy = UserStrategy("mine:rank", lambda ready, *, published_version: returned(ready))
    with pytest.raises(RunFailed, match=f"buffer.strategy: mine:rank .*{complaint}"):
        strategy.rank(groups(0, 0), published_version=3)


@pytest.mark.parametrize(
    "text, path, complaint",
    [
        ("", "{name}:rank", "has no 'rank'; its functions are: none"),
        ("def rang(ready, *, published_version): ...", "{name}:rank", "its functions are: rang"),
        ("import nowhere_to_be_found", "{name}:rank", "importing .* failed: ModuleNotFoundError"),
        ("raise SystemExit(3)", "{name}:rank", "importing .* failed: SystemExit: 3"),
        ("def rank(ready): ...", "{name}:rank", "cannot be called as rank"),
        ("rank = 5", "{name}:rank", "is no function but int"),
        ("async def rank(ready, *, published_version): ...", "{name}:rank", "is async"),
        ("class Own: ...", "{name}:Own", "making it with the config failed"),
        ("class Own:\n    def __init__(self, config): ...", "{name}:Own", "cannot be called as rank"),
    ],
)
def test_a_strategy_that_cannot_be_loaded_is_the_users_error(own_module, text, path, complaint):
    value = path.format(name=own_module(text))
    with pytest.raises(UserError, match=f"buffer.strategy: {value}.*{complaint}"):
        load_strategy(with_strategy(value))


@pytest.mark.parametrize("value, hint", [("freshes", "did you mean freshest"), ("my.module.rank", "package.module")])
def test_neither_a_name_nor_a_path(value, hint):
    with pytest.raises(UserError, match=f"buffer.strategy: '{value}'; expected fifo, .*{hint}"):
        load_strategy(with_strategy(value))


def test_the_too_old_are_evicted_and_then_the_oldest_that_are_too_many():
    ready = groups(5, 2, 4, 3, 5)
    evicted = evictions(ready, published_version=5, capacity=2, max_age=2)
    assert evicted == [
        (1, "3 versions old (buffer.max_age: 2)"),
        (3, "the oldest of more than 2 complete groups (buffer.capacity)"),
        (2, "the oldest of more than 2 complete groups (buffer.capacity)"),
    ]
    assert [group_id for group_id, _ in evictions(ready, published_version=5, capacity=2, max_age=0)] == [1, 3, 2]
    assert [group_id for group_id, _ in evictions(ready, published_version=5, capacity=None, max_age=1)] == [1, 3]
    assert evictions(ready, published_version=5, capacity=5, max_age=3) == []
    assert evictions(ready, published_version=5, capacity=None, max_age=None) == []

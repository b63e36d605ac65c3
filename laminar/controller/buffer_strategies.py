"""Which complete groups are preferred for the next step, and which are evicted from the experience buffer.

Invariants: a strategy only ranks: it never loses a group, and the schedule keeps `max_staleness` whatever it says. The
same groups at the same version are ranked the same in every run of a config.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from laminar.config.schema import ExperimentConfig
from laminar.config.user_function import DOTTED_PATH, in_one_line, load_function
from laminar.controller.schedules.schedule import ReadyGroup
from laminar.errors import RunFailed, UserError

KEY = "buffer.strategy"
BUILT_IN = ("fifo", "freshest", "staleness_weighted")


class BufferStrategy(Protocol):
    """Ranks the groups of the experience buffer."""

    def rank(self, ready: Sequence[ReadyGroup], *, published_version: int) -> list[ReadyGroup]:
        """All ready groups, the preferred ones first; staleness is `published_version` less a group's version."""
        ...


class Fifo:
    """In the order of admission."""

    def rank(self, ready: Sequence[ReadyGroup], *, published_version: int) -> list[ReadyGroup]:
        """The group that was admitted first comes first."""
        return sorted(ready, key=_group_id)


class Freshest:
    """The newest version first, among the same version in the order of admission."""

    def rank(self, ready: Sequence[ReadyGroup], *, published_version: int) -> list[ReadyGroup]:
        """The least stale group comes first."""
        return sorted(ready, key=lambda group: (-group.policy_version, group.group_id))


class StalenessWeighted:
    """Drawn without replacement, each group with the weight 2 ** (-staleness / half_life).

    By exponential keys, E / weight ascending (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006:
    u ** (1 / weight) descending, with E = -log u). In logarithms, because weights may be too small for a float.
    """

    def __init__(self, *, half_life: float, seed: int) -> None:
        """`half_life`: in versions."""
        self._rate = math.log(2) / half_life
        self._seed = seed % 2**64  # a generator takes no negative seed

    def rank(self, ready: Sequence[ReadyGroup], *, published_version: int) -> list[ReadyGroup]:
        """The group that is drawn first comes first; every version has its own draws, however often it is asked."""
        draws = np.random.default_rng([self._seed, published_version]).standard_exponential(len(ready))  # float64 [N]
        groups = sorted(ready, key=_group_id)  # the draws do not depend on the order of completion
        staleness = np.array([published_version - group.policy_version for group in groups], np.float64)  # [N]
        keys = np.log(draws) + staleness * self._rate
        return [groups[k] for k in np.argsort(keys, kind="stable")]


class UserStrategy:
    """The user's own ranking, checked at every call."""

    def __init__(self, name: str, rank: Callable[..., Sequence[ReadyGroup]]) -> None:
        """`name`: as in the config, for messages."""
        self._name = name
        self._rank = rank

    def rank(self, ready: Sequence[ReadyGroup], *, published_version: int) -> list[ReadyGroup]:
        """The groups that the user's ranking returns, then those that it left out, in the order of admission.

        Raises:
            RunFailed: it raised, or returned something else than some of the ready groups, each at most once.
        """
        left = {group.group_id: group for group in sorted(ready, key=_group_id)}
        ranked: list[ReadyGroup] = []
        try:
            for group in self._rank(list(left.values()), published_version=published_version):
                if left.get(getattr(group, "group_id", -1)) != group:
                    raise RunFailed(
                        f"{KEY}: {self._name} returned {group!r}, which is not one of the ready groups that it was given, or "
                        "comes twice; expected the groups themselves, each at most once"
                    )
                ranked.append(left.pop(group.group_id))
        except RunFailed:
            raise
        except Exception as error:  # foreign code raises what it likes
            raise RunFailed(
                f"{KEY}: {self._name} failed at version {published_version}: {in_one_line(error)}"
            ) from error
        return [*ranked, *left.values()]


def load_strategy(config: ExperimentConfig) -> BufferStrategy:
    """The strategy of an experiment; imports the user's module from the working directory or the environment.

    Raises:
        UserError: no such strategy, the module cannot be imported, or what it holds cannot be called as a strategy.
    """
    name = config.buffer.strategy
    match name:
        case "fifo":
            return Fifo()
        case "freshest":
            return Freshest()
        case "staleness_weighted":
            return StalenessWeighted(half_life=config.buffer.half_life, seed=config.seed)
    rank = _import(name)
    if inspect.isclass(rank):
        make: Callable[[ExperimentConfig], Any] = rank
        try:
            rank = getattr(make(config), "rank", None)
        except Exception as error:  # foreign code raises what it likes
            raise UserError(
                f"{KEY}: {name}: making it with the config failed: {in_one_line(error)}; mend the class"
            ) from error
    try:
        inspect.signature(rank).bind([], published_version=0)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{KEY}: {name} cannot be called as rank(ready, *, published_version) ({error}); expected a function of that "
            "signature, or a class that is made with the config and has such a method `rank`"
        ) from error
    if inspect.iscoroutinefunction(rank):
        raise UserError(
            f"{KEY}: {name} is async, and the controller cannot wait in the middle of a choice; make it a plain function"
        )
    return UserStrategy(name, rank)


def _import(name: str) -> Any:
    if not DOTTED_PATH.fullmatch(name):
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"{KEY}: {name!r}; expected {', '.join(BUILT_IN)} or a dotted path package.module:function{hint}"
        )
    return load_function(KEY, name)


def evictions(
    ready: Sequence[ReadyGroup], *, published_version: int, capacity: int | None, max_age: int | None
) -> list[tuple[int, str]]:
    """(group id, reason) of the complete groups to evict: those that are too old, then the oldest that are too many.

    Args:
        ready: groups in the buffer.
        published_version: the trainer's version; a group's age is this less its own, in versions.
        capacity: complete groups that are kept at most; None for no limit.
        max_age: groups of a higher age go; None for no limit.
    """
    if max_age is None and (capacity is None or len(ready) <= capacity):
        return []
    oldest_first = sorted(ready, key=lambda group: (group.policy_version, group.group_id))
    too_old = 0
    if max_age is not None:
        too_old = sum(published_version - group.policy_version > max_age for group in oldest_first)
    too_many = 0 if capacity is None else max(0, len(ready) - too_old - capacity)
    evicted: list[tuple[int, str]] = []
    for group in oldest_first[: too_old + too_many]:
        age = published_version - group.policy_version
        if len(evicted) < too_old:
            reason = f"{age} versions old (buffer.max_age: {max_age})"
        else:
            reason = f"the oldest of more than {capacity} complete groups (buffer.capacity)"
        evicted.append((group.group_id, reason))
    return evicted


def _group_id(group: ReadyGroup) -> int:
    return group.group_id

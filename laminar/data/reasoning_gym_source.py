"""Prompts from reasoning-gym generators, mixed by weight.

Invariant: an entry is made when it is asked for, by a generator whose seed and size depend on the entry's index alone.
A generator is never asked for more than CHUNK entries, because some of them do work or take memory for every entry
that they are announced (and one refuses more than 20,000).
"""

from __future__ import annotations

import dataclasses
import difflib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from laminar.config.data_schema import ReasoningGymComponent, ReasoningGymSource
from laminar.data.mixture import Mixture
from laminar.data.source import Entry, derive_seed
from laminar.errors import UserError

CHUNK = 1000  # entries per generator object
KEPT_CHUNKS = 2  # generator objects kept per component: fetches run along the data, two are enough at a border
RESERVED_PARAMS = {"seed": "seed", "size": "prompts"}  # parameter -> key of the source to set instead
OPEN_ANSWER = "answer_is_open"  # metadata key of entries whose generator has no single right answer


def make_generator(component: ReasoningGymComponent, key: str, *, seed: int, size: int) -> Any:
    """A reasoning-gym data set.

    Args:
        component: its name and parameters.
        key: where the component stands, for example `data.source.datasets[0]`, for messages.
        seed: of the data set.
        size: entries that it may be asked for.

    Raises:
        UserError: unknown name, or parameters that the generator refuses.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if component.name not in DATASETS:
        near = difflib.get_close_matches(component.name, DATASETS, n=3, cutoff=0.4)
        hint = f"the nearest are: {', '.join(near)}" if near else f"there are: {', '.join(sorted(DATASETS))}"
        raise UserError(f"{key}.name: reasoning-gym has no data set {component.name!r}; {hint}")
    for name, instead in RESERVED_PARAMS.items():
        if name in component.params:
            raise UserError(
                f"{key}.params.{name}: set {key.partition('.datasets')[0]}.{instead} instead; the generators' own is derived from it"
            )
    known = [field.name for field in dataclasses.fields(DATASETS[component.name][1])]
    for name in component.params:
        if name not in known:
            offered = ", ".join(field for field in known if field not in RESERVED_PARAMS) or "none"
            raise UserError(f"{key}.params: {component.name} has no parameter {name!r}; it has: {offered}")
    try:
        return reasoning_gym.create_dataset(component.name, seed=seed, size=size, **component.params)
    except Exception as error:  # generators check their parameters with whatever they like, assertions included
        raise UserError(f"{key}.params: {component.name} refuses {component.params}: {describe(error)}") from error


@contextmanager
def seeded_global_random(seed: int) -> Iterator[None]:
    """Python's and NumPy's global random generators start from `seed` inside, and are as before after it.

    A few data sets (list_functions) draw from them although they are given a seed.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def describe(error: Exception) -> str:
    """The generator's message, or its kind where it gives none."""
    return str(error) or type(error).__name__


def component_labels(datasets: Sequence[ReasoningGymComponent]) -> list[str]:
    """The name of each component, with its place where the same data set stands in the mixture more than once."""
    counts = Counter(component.name for component in datasets)
    return [
        component.name if counts[component.name] == 1 else f"{component.name}[{place}]"
        for place, component in enumerate(datasets)
    ]


class ReasoningGymPrompts:
    """A `PromptSource` over a mixture of generators."""

    def __init__(self, config: ReasoningGymSource, seed: int, key: str = "data.source") -> None:
        """Make the generators ready.

        Args:
            config: `data.source`.
            seed: the experiment's seed, used where the source has none of its own.
            key: dotted key of the source, for messages.

        Raises:
            UserError: unknown data set, or parameters that its generator refuses.
        """
        seed = seed if config.seed is None else config.seed
        self._config = config
        self._key = key
        self._mixture = Mixture([component.weight for component in config.datasets], seed)
        self._labels = component_labels(config.datasets)
        self._seeds = [derive_seed(seed, place, component.name) for place, component in enumerate(config.datasets)]
        self._chunk = lru_cache(maxsize=KEPT_CHUNKS * len(config.datasets))(self._make_chunk)
        for place in range(len(config.datasets)):
            self._chunk(place, 0)

    @property
    def size(self) -> int | None:
        """`data.source.prompts`."""
        return self._config.prompts

    def entry(self, position: int) -> Entry:
        """The entry at a position; later epochs repeat the first."""
        if self._config.prompts is not None:
            position %= self._config.prompts
        return self.component_entry(*self._mixture.locate(position))

    def component_entry(self, place: int, index: int) -> Entry:
        """Entry `index` of one component.

        Raises:
            UserError: the generator fails, or makes what cannot be sent.
        """
        key = f"{self._key}.datasets[{place}] ({self._labels[place]})"
        chunk, offset = divmod(index, CHUNK)
        try:
            with seeded_global_random(derive_seed(self._seeds[place], index)):
                made = self._chunk(place, chunk)[offset]
        except UserError:
            raise
        except Exception as error:  # foreign code; whatever it raises, the message has to name the generator
            raise UserError(
                f"{key}: entry {index} cannot be made with parameters {self._config.datasets[place].params}: "
                f"{describe(error)}. Change the parameters or leave this data set out"
            ) from error
        metadata = dict(made.get("metadata") or {})
        if made["answer"] is None:
            metadata[OPEN_ANSWER] = True
        answer = "" if made["answer"] is None else str(made["answer"])
        return Entry(source=self._labels[place], question=str(made["question"]), answer=answer, metadata=metadata)

    def _make_chunk(self, place: int, chunk: int) -> Any:
        # Generators draw entry i from Random(seed + i): seeds a chunk apart continue each other and never overlap.
        seed = self._seeds[place] + chunk * CHUNK
        return make_generator(self._config.datasets[place], f"{self._key}.datasets[{place}]", seed=seed, size=CHUNK)

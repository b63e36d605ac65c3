"""Prompts from several sources, spread evenly by weight.

Invariant: each source is read at its own positions 0, 1, 2, ... without gaps, whatever the others do; so every epoch of a
source's own data is complete, and one position of the mixture is one position of one source.
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.data.mixture import Mixture
from laminar.data.source import Entry, PromptSource
from laminar.errors import UserError


class MixedPrompts:
    """A `PromptSource` over other sources."""

    def __init__(
        self, sources: Sequence[PromptSource], weights: Sequence[float | None], *, seed: int, prompts: int | None
    ) -> None:
        """Mix them.

        Args:
            sources: the parts.
            weights: one for each; all None: by size.
            seed: of the pattern.
            prompts: in an epoch; None: as many as the sources hold together.

        Raises:
            UserError: some have a weight and others none, or one that never ends has none.
        """
        self._sources = sources
        given = [weight for weight in weights if weight is not None]
        sizes = [source.size for source in sources]
        known = [size for size in sizes if size is not None]
        if given and len(given) < len(sources):
            place = list(weights).index(None)
            raise UserError(
                f"data.source.sources.{place}.weight: missing; give all sources of a mixture a weight, or none"
            )
        if not given and len(known) < len(sources):
            place = sizes.index(None)
            raise UserError(
                f"data.source.sources.{place}.weight: missing; this source never ends, so the mixture cannot go by size: give "
                "all sources a weight"
            )
        self._mixture = Mixture(given or known, seed)
        self._size = prompts if prompts is not None else sum(known) if len(known) == len(sources) else None

    @property
    def size(self) -> int | None:
        """Prompts in an epoch."""
        return self._size

    def entry(self, position: int) -> Entry:
        """The entry at a position; the sources go on through their own epochs."""
        component, index = self._mixture.locate(position)
        return self._sources[component].entry(index)

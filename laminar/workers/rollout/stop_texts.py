"""Texts that end a turn, found in what an engine generates token by token.

Engines know stop tokens only; a marker like `</code>` is several tokens in most vocabularies, and not always the same ones.
Invariant: a turn ends with the token in which the first stop text ends, whatever the engine made beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class StopTexts:
    """The texts of a run, and what is known of the vocabulary."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        """`texts` are not empty."""
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        self._last_characters = {text[-1] for text in texts}
        self._ends: dict[int, bool] = {}  # token -> whether a stop text could end in it
        self.window = max(len(text.encode()) for text in texts)  # tokens that one can stretch over, the last included
        self.token_ids = tuple(ids[0] for ids in map(self._encode, texts) if len(ids) == 1)  # engines stop at these

    def watch(self, token_ids: NDArray[np.int32]) -> StopWatch:
        """Look through what comes after these response tokens, int32 [T]."""
        return StopWatch(self, token_ids[-self.window :].tolist())

    def may_end_in(self, token: int) -> bool:
        """Whether a stop text could end in this token."""
        known = self._ends.get(token)
        if known is None:
            text = self.decode([token])
            # Part of a character shows as the replacement character: only the whole tells.
            known = self._ends[token] = "\ufffd" in text or any(last in text for last in self._last_characters)
        return known

    def ends_in_last(self, token_ids: list[int]) -> bool:
        """Whether a stop text ends in the last of these tokens."""
        text = self.decode(token_ids)
        before = len(self.decode(token_ids[:-1]).rstrip("\ufffd"))  # a character that the last token completes
        return any(text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in self._texts)

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, special ones included: they may be markers."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids if self.decode(ids) == text else []


class StopWatch:
    """One stream."""

    def __init__(self, texts: StopTexts, tail: list[int]) -> None:
        self._texts = texts
        self._tail = tail  # the newest tokens, `window` at most

    def tokens_to_keep(self, token_ids: NDArray[np.int32]) -> int | None:
        """Look at the next tokens, int32 [D]; how many of them belong to the turn if it ends here, else None."""
        for index, token in enumerate(token_ids.tolist()):
            self._tail = [*self._tail[1 - self._texts.window :], token] if self._texts.window > 1 else [token]
            if self._texts.may_end_in(token) and self._texts.ends_in_last(self._tail):
                return index + 1
        return None

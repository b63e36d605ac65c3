"""From an environment's words to token ids that go on behind the model's own.

Invariant: only the observation is tokenized; what the model wrote stays as it was generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.errors import UserError

SENTINEL = "LaminarObservation"  # stands for the observation while the chat template is looked at
SENTINEL_TURN = "LaminarTurn"


class ObservationEncoder:
    """Tokenizes observations, and decodes turns for those who make them."""

    def __init__(self, tokenizer: Any, *, chat: bool, max_tokens: int, stop_token_ids: Sequence[int]) -> None:
        """
        Args:
            tokenizer: Hugging Face tokenizer.
            chat: `data.chat`.
            max_tokens: longer observations lose their middle.
            stop_token_ids: end-of-sequence ids of the model.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._stop = frozenset(stop_token_ids)
        self._chat = chat
        self._around: tuple[str, str] | None = None

    def encode(self, text: str, *, as_message: bool, turn: NDArray[np.int32]) -> NDArray[np.int32]:
        """Token ids of an observation, int32 [D], to stand behind a turn (int32 [T]).

        Under `data.chat` a message of its own gets what the chat template puts around it: the end of the model's message
        (unless the turn has ended with it), and the beginning of the next.

        Raises:
            UserError: the chat template does not show what stands between two messages.
        """
        if self._chat and as_message:
            self._around = self._around or _around_message(self._tokenizer)
            before, after = self._around
            if len(turn) and int(turn[-1]) in self._stop:
                before = before.removeprefix(self._tokenizer.decode([int(turn[-1])]))
            text = f"{before}{text}{after}"
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > self._max_tokens:
            tail = self._max_tokens // 2
            ids = ids[: self._max_tokens - tail] + ids[len(ids) - tail :]
        return np.asarray(ids, dtype=np.int32)

    def decode(self, turn: NDArray[np.int32]) -> str:
        """Text of a turn [T] without the end-of-sequence token at its end; other special tokens may be markers, and stay."""
        ids = turn.tolist()
        while ids and ids[-1] in self._stop:
            ids.pop()
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _around_message(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts between the end of the model's words and a user's, and between these and the model's next."""
    rendered: str = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": SENTINEL_TURN},
            {"role": "user", "content": SENTINEL},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    _, turn, rest = rendered.partition(SENTINEL_TURN)
    before, observation, after = rest.partition(SENTINEL)
    if not turn or not observation:
        raise UserError(
            "data.chat: true, but the tokenizer's chat template does not render a user's message after the model's, which "
            "this environment needs; take a model whose template does, or set data.chat: false"
        )
    return before, after

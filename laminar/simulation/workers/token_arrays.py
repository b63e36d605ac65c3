"""The tokens and logprobs that modelled rollouts send."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LOGPROB = -1.0
MIN_TOKENS = 1 << 16  # of the arrays that messages are cut from
KEPT_VERSIONS = 8


class TokenArrays:
    """Arrays that the deltas' tokens are slices of: nothing is allocated for a message. Shared by all rollouts."""

    def __init__(self) -> None:
        self._token_ids: dict[int, NDArray[np.int32]] = {}
        self._logprobs: NDArray[np.float32] = _constant(LOGPROB, MIN_TOKENS, np.float32)

    def token_ids(self, version: int, count: int) -> NDArray[np.int32]:
        """That many tokens of this version: int32 [count], each of them the version."""
        array: NDArray[np.int32] | None = self._token_ids.get(version)
        if array is None or len(array) < count:
            while len(self._token_ids) >= KEPT_VERSIONS:
                del self._token_ids[min(self._token_ids)]
            array = self._token_ids[version] = _constant(version, _room(count), np.int32)
        return array[:count]

    def logprobs(self, count: int) -> NDArray[np.float32]:
        """float32 [count], all the same."""
        if len(self._logprobs) < count:
            self._logprobs = _constant(LOGPROB, _room(count), np.float32)
        return self._logprobs[:count]


def _constant(value: float, count: int, dtype: type) -> NDArray[Any]:
    array: NDArray[Any] = np.full(count, value, dtype)
    array.flags.writeable = False
    return array


def _room(count: int) -> int:
    return max(MIN_TOKENS, 1 << count.bit_length())

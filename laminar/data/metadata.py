"""Metadata as JSON and back, without loss: generators compare tuples and look up integer keys when they score.

Invariant: `decode_metadata(encode_metadata(m)) == m`, types included. What plain JSON can say stays plain JSON; only
tuples and mappings whose keys are not text are written as objects with one tag.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

TUPLE_TAG = "$tuple"
MAPPING_TAG = "$mapping"
TAGS = frozenset({TUPLE_TAG, MAPPING_TAG})


def encode_metadata(metadata: dict[str, Any]) -> str:
    """JSON text.

    Raises:
        TypeError: a value is neither JSON, a tuple, a mapping nor a NumPy scalar or array.
    """
    return json.dumps(_plain(metadata), ensure_ascii=False)


def decode_metadata(text: str) -> dict[str, Any]:
    """The metadata that `encode_metadata` was given."""
    decoded = _restored(json.loads(text))
    if not isinstance(decoded, dict):
        raise ValueError(f"metadata must be an object, got {text[:80]}")
    return decoded


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return {TUPLE_TAG: [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        # A user's own single tag-like key goes the long way round too, so that it is not taken for a tag.
        if all(isinstance(key, str) for key in value) and not (len(value) == 1 and TAGS & value.keys()):
            return {key: _plain(item) for key, item in value.items()}
        return {MAPPING_TAG: [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1 and TUPLE_TAG in value:
            return tuple(_restored(item) for item in value[TUPLE_TAG])
        if len(value) == 1 and MAPPING_TAG in value:
            return {_restored(key): _restored(item) for key, item in value[MAPPING_TAG]}
        return {key: _restored(item) for key, item in value.items()}
    return value

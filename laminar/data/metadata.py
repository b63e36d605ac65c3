"""Metadata as JSON and back, without loss: generators compare tuples and look up integer keys when they score.

Invariant: `decode_metadata(encode_metadata(m)) == m`, types included. What plain JSON can say stays plain JSON; only
tuples, mappings whose keys are not text, and the values that columns of a Parquet file may hold beside those (bytes, dates
and times, decimals) are written as objects with one tag.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

TUPLE_TAG = "$tuple"
MAPPING_TAG = "$mapping"
# type -> tag, to text, and back; the first that fits
TEXTS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    datetime: ("$datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("$date", date.isoformat, date.fromisoformat),
    time: ("$time", time.isoformat, time.fromisoformat),
    timedelta: (
        "$microseconds",
        lambda value: str(value // timedelta(microseconds=1)),
        lambda text: timedelta(microseconds=int(text)),
    ),
    Decimal: ("$decimal", str, Decimal),
}
READ = {tag: read for tag, _, read in TEXTS.values()}
TAGS = frozenset({TUPLE_TAG, MAPPING_TAG, *READ})


def encode_metadata(metadata: dict[str, Any]) -> str:
    """JSON text.

    Raises:
        TypeError: a value is neither JSON, a tuple, a mapping, one of `TEXTS` nor a NumPy scalar or array.
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
    for kind, (tag, write, _) in TEXTS.items():
        if isinstance(value, kind):
            return {tag: write(value)}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1 and TUPLE_TAG in value:
            return tuple(_restored(item) for item in value[TUPLE_TAG])
        if len(value) == 1 and MAPPING_TAG in value:
            return {_restored(key): _restored(item) for key, item in value[MAPPING_TAG]}
        if len(value) == 1 and (tag := next(iter(value))) in READ:
            return READ[tag](value[tag])
        return {key: _restored(item) for key, item in value.items()}
    return value

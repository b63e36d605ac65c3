from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from laminar.data.metadata import decode_metadata, encode_metadata


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"a": [1, 2.5, None, True, "ü"], "b": {"c": []}},
        {"grid": ((0, 1), (2, 3)), "mixed": [(1,), [2]]},
        {"colors": {1: "red", (2, 3): "blue"}},
        {"$tuple": [1, 2]},
        {"outer": {"$mapping": [["a", 1]]}},
        {"$tuple": (1,), "other": 2},
        {"image": b"\x00\xff", "cost": Decimal("1.50"), "took": timedelta(days=-1, microseconds=3)},
        {"at": datetime(2024, 2, 29, 12, 0, 0, 5, UTC), "on": date(2024, 2, 29), "from": time(6, 30)},
        {"$bytes": "no base64"},
    ],
)
def test_comes_back_with_its_types(metadata: dict[str, object]) -> None:
    back = decode_metadata(encode_metadata(metadata))
    assert back == metadata
    assert repr(back) == repr(metadata)  # tells (1,) from [1] and 1 from "1"


def test_plain_metadata_stays_plain_json() -> None:
    metadata = {"difficulty": {"words": [3, 10]}, "word": "sun"}
    assert json.loads(encode_metadata(metadata)) == metadata


def test_numpy_values_become_python_ones() -> None:
    back = decode_metadata(encode_metadata({"n": np.int64(3), "s": np.str_("x"), "a": np.arange(3)}))
    assert back == {"n": 3, "s": "x", "a": [0, 1, 2]}


def test_what_json_cannot_say_is_an_error() -> None:
    with pytest.raises(TypeError, match="Fraction"):
        encode_metadata({"x": Fraction(1, 3)})

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.config.overrides import apply_overrides
from laminar.errors import UserError


def applied(data, *overrides):
    apply_overrides(data, overrides)
    return data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1.5", 1.5),
        ("a=true", True),
        ("a=null", None),
        ("a=", None),
        ("a=text", "text"),
        ("a='1'", "1"),
        ("a=[1, x]", [1, "x"]),
        ("a={b: 2}", {"b": 2}),
        ("a=b=c", "b=c"),
        (" a =1", 1),
    ],
)
def test_values_are_yaml(text, value):
    assert applied({}, text) == {"a": value}


def test_sections_on_the_way_are_created():
    assert applied({}, "a.b.c=1") == {"a": {"b": {"c": 1}}}
    assert applied({"a": None}, "a.b=1") == {"a": {"b": 1}}


def test_only_the_named_key_changes():
    assert applied({"a": {"b": 1, "c": 2}}, "a.b=3") == {"a": {"b": 3, "c": 2}}


def test_the_last_override_wins():
    assert applied({}, "a=1", "a=2") == {"a": 2}


def test_list_elements_are_named_by_index():
    assert applied({"a": [{"b": 1}, 2]}, "a.0.b=3", "a.1=4") == {"a": [{"b": 3}, 4]}


@pytest.mark.parametrize("index", ["2", "-1", "x", "²"])
def test_an_index_outside_the_list(index):
    with pytest.raises(UserError, match=r"a is a list of 2, so after it comes an index from 0 to 1"):
        applied({"a": [1, 2]}, f"a.{index}=3")


def test_a_plain_value_has_no_keys():
    with pytest.raises(UserError, match="--set a.b=1: a is 5, which has no key 'b'; set a itself"):
        applied({"a": 5}, "a.b=1")


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", ".a=1", "a.=1", ""])
def test_what_is_no_override(text):
    with pytest.raises(UserError, match="expected KEY=VALUE"):
        applied({}, text)


def test_a_value_that_is_no_yaml():
    with pytest.raises(UserError, match="--set a=\\[1: the value:1:3: not valid YAML"):
        applied({}, "a=[1")


# JSON writes characters above U+FFFF as two escapes, which YAML reads as two characters.
TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=5,
)


@given(VALUES)
def test_any_json_value_is_read_as_it_was_written(value):
    assert applied({}, f"a={json.dumps(value)}") == {"a": value}

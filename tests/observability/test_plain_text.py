from __future__ import annotations

import pytest

from laminar.observability.plain_text import (
    bars,
    data_size,
    duration,
    one_line,
    percent,
    printable,
    short_number,
    table,
)


def test_table_puts_numbers_right_and_texts_left():
    text = table(["name", "tokens", "rate"], [["a", 7, 0.5], ["longer", 1234, None]])
    assert text.splitlines() == ["name    tokens  rate", "a            7   0.5", "longer    1234     -"]


def test_table_without_rows_is_its_header():
    assert table(["a", "b"], []) == "a  b"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (7, "7"), (999.99, "1.0k"), (12_345, "12.3k"), (3.2e6, "3.2M"), (float("nan"), "nan")],
)
def test_short_number(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.003, "3 ms"),
        (0.0004, "0.4 ms"),
        (4.2, "4.2 s"),
        (59.99, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_sizes_and_percents():
    assert [data_size(940), data_size(3_200_000)] == ["940 B", "3.2 MB"]
    assert [percent(0), percent(0.004), percent(0.123)] == ["0 %", "0.4 %", "12 %"]


def test_printable_disarms_control_characters():
    assert printable("a\x1b[2Jb\r\nc\u202e") == "a\\x1b[2Jb\\r\nc\\u202e"
    assert one_line("first\nsecond", 9) == "first\\..."


def test_bars_rise_with_the_values_and_average_what_does_not_fit():
    assert bars([0.0, 0.5, 1.0], width=10, height=1) == ["▁▅█"]
    assert bars([0.0, 0.5, 1.0], width=10, height=2) == [" ▁█", "▁██"]
    assert len(bars(list(range(100)), width=10, height=1)[0]) == 10
    assert bars([], width=10, height=1) == []
    assert bars([float("nan"), 2.0, 2.0], width=10, height=1) == ["▅▅"]

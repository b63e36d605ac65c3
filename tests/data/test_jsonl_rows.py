from __future__ import annotations

import json
from pathlib import Path

import pytest

from laminar.data.jsonl_rows import JsonlRows
from laminar.errors import UserError

KEY = "data.source.path"


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_rows_by_index(tmp_path: Path) -> None:
    rows = JsonlRows(write(tmp_path / "data.jsonl", {"a": 1}, "", {"b": ["x"]}), KEY)
    assert len(rows) == 2
    assert [rows.row(index) for index in (1, 0, 1)] == [{"b": ["x"]}, {"a": 1}, {"b": ["x"]}]
    assert rows.where(1) == f"{tmp_path}/data.jsonl:3"
    assert (rows.title, rows.columns) == ("data.jsonl", None)


def test_blank_lines_byte_order_mark_and_missing_final_newline(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "\xc3\xbc"}')
    rows = JsonlRows(str(path), KEY)
    assert [rows.row(index)["prompt"] for index in range(len(rows))] == ["a", "ü"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', r"data\.jsonl:3: not JSON"),
        ("[1]", r"data\.jsonl:3: expected a JSON object, got a list"),
        ("[" * 100_000, r"data\.jsonl:3: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "data.jsonl", {"prompt": "fine"}, "", line)
    with pytest.raises(UserError, match=message):
        JsonlRows(path, KEY)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"data\.jsonl:2: not UTF-8"):
        JsonlRows(str(path), KEY)


def test_empty_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.source\.path: .*holds no entries; expected one JSON object per line"):
        JsonlRows(write(tmp_path / "empty.jsonl", "", "  "), KEY)
    with pytest.raises(UserError, match=r"data\.source\.path: cannot read .*missing\.jsonl: No such file"):
        JsonlRows(str(tmp_path / "missing.jsonl"), KEY)
    with pytest.raises(UserError, match=r"data\.source\.path: cannot read .*: Is a directory"):
        JsonlRows(str(tmp_path), KEY)


def test_a_file_changed_under_the_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = JsonlRows(write(path, {"prompt": "question 0"}, {"prompt": "question 1"}), KEY)
    path.write_text("x" * 200)
    with pytest.raises(UserError, match=r"data\.jsonl:2: not JSON"):
        rows.row(1)

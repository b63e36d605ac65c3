from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from laminar.observability.json_lines import JsonLines, plain


@pytest.fixture
def errors():
    return []


@pytest.fixture
def lines(tmp_path, errors):
    lines = JsonLines(tmp_path / "x.jsonl", lambda path, error: errors.append(error))
    yield lines
    lines.close()


def read(lines):
    return [json.loads(line) for line in lines.path.read_text().splitlines()]


def test_a_line_can_be_read_at_once(lines):
    lines.write({"a": 1})
    assert read(lines) == [{"a": 1}]
    lines.write({"a": "zwei\n"})
    assert read(lines) == [{"a": 1}, {"a": "zwei\n"}]


def test_numbers_that_json_lacks_become_null_and_numpy_becomes_plain():
    value = {"a": float("nan"), "b": np.float32(0.5), "c": np.array([1, 2]), "d": (np.inf, True, None)}
    assert plain(value) == {"a": None, "b": 0.5, "c": [1, 2], "d": [None, True, None]}
    with pytest.raises(TypeError, match="set"):
        plain({"a": {1}})


def test_a_full_disk_costs_the_line_and_leaves_no_half_of_it(lines, errors, monkeypatch):
    lines.write({"n": 1})
    write = os.write

    def almost_full(file, data):
        if len(data) > 5:
            return write(file, data[:5])  # the kernel takes what fits, then refuses
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", almost_full)
        lines.write({"n": 2})
    assert (lines.lost, len(errors), read(lines)) == (1, 1, [{"n": 1}])
    lines.write({"n": 3})
    assert read(lines) == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize(
    ("left", "whole"),
    [(b'{"n":0}\n{"n":1}\n', 2), (b'{"n":0}\n{"n":', 1), (b'{"n":', 0), (b"", 0), (b'{"n":0}\n' + b"x" * 200_000, 1)],
)
def test_half_a_line_of_a_writer_that_was_killed_is_removed(tmp_path, errors, left, whole):
    (tmp_path / "x.jsonl").write_bytes(left)
    lines = JsonLines(tmp_path / "x.jsonl", lambda path, error: errors.append(error))
    lines.write({"n": whole})
    assert read(lines) == [{"n": n} for n in range(whole + 1)]
    lines.close()


def test_dev_full(errors):
    lines = JsonLines(Path("/dev/full"), lambda path, error: errors.append(error))
    lines.write({"n": 1})
    assert [error.errno for error in errors] == [errno.ENOSPC]


def test_many_lines_at_once_and_those_that_do_not_fit_cost_no_others(lines, errors, monkeypatch):
    lines.write_all({"n": n} for n in range(3))
    write, room = os.write, [20]

    def almost_full(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", almost_full)
        lines.write_all({"n": n} for n in range(3, 9))  # 8 bytes each: two and a half of them fit
    assert (lines.lost, len(errors)) == (4, 1)
    lines.write_all([])
    lines.write({"n": 9})
    assert [line["n"] for line in read(lines)] == [0, 1, 2, 3, 4, 9]


def test_what_is_written_can_be_read_whatever_it_holds(lines):
    lines.write({"a": float("nan"), "b": np.float32(0.5), "c": np.array([1, 2]), "d": (np.inf, True, None), "e": "é\n"})
    lines.write({"file": "\udc80", "f": -np.inf})
    assert read(lines) == [
        {"a": None, "b": 0.5, "c": [1, 2], "d": [None, True, None], "e": "é\n"},
        {"file": "?", "f": None},
    ]

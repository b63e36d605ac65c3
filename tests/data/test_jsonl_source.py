from __future__ import annotations

import json
from pathlib import Path

import pytest

from laminar.config.schema import JsonlSource
from laminar.data.jsonl_source import JsonlPrompts
from laminar.errors import UserError


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def numbered(path: Path, count: int) -> str:
    return write(path, *({"prompt": f"question {number}", "answer": str(number)} for number in range(count)))


def open_jsonl(path: str, seed: int = 0, **keys: object) -> JsonlPrompts:
    return JsonlPrompts(JsonlSource.model_validate({"type": "jsonl", "path": path, **keys}), seed)


def test_entries_carry_answer_and_all_other_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path / "data.jsonl",
        {"prompt": "2 + 3?", "answer": 5, "level": "easy", "tests": [1, 2]},
        {"prompt": "half?", "answer": 0.5},
        {"prompt": "no answer"},
        {"prompt": "null answer", "answer": None},
    )
    source = open_jsonl(path, shuffle=False)
    entries = [source.entry(position) for position in range(4)]
    assert [entry.question for entry in entries] == ["2 + 3?", "half?", "no answer", "null answer"]
    assert [entry.answer for entry in entries] == ["5", "0.5", "", ""]
    assert entries[0].metadata == {"level": "easy", "tests": [1, 2]}
    assert entries[0].source == "data.jsonl"
    assert source.size == 4


def test_field_names_are_the_users(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", {"q": "why?", "a": "so", "prompt": "other"})
    entry = open_jsonl(path, prompt_field="q", answer_field="a").entry(0)
    assert (entry.question, entry.answer, entry.metadata) == ("why?", "so", {"prompt": "other"})


def test_each_epoch_is_a_new_permutation_of_all_lines(tmp_path: Path) -> None:
    path = numbered(tmp_path / "data.jsonl", 50)
    source = open_jsonl(path, seed=3)
    epochs = [[source.entry(50 * epoch + place).answer for place in range(50)] for epoch in range(3)]
    assert all(sorted(epoch, key=int) == [str(number) for number in range(50)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3

    again = open_jsonl(path, seed=3)
    assert [again.entry(position).answer for position in reversed(range(150))] == [
        answer for epoch in epochs for answer in epoch
    ][::-1]
    other = open_jsonl(path, seed=4)
    assert [other.entry(place).answer for place in range(50)] != epochs[0]


def test_without_shuffle_epochs_keep_the_files_order(tmp_path: Path) -> None:
    source = open_jsonl(numbered(tmp_path / "data.jsonl", 3), shuffle=False)
    assert [source.entry(position).answer for position in range(7)] == ["0", "1", "2", "0", "1", "2", "0"]


def test_blank_lines_byte_order_mark_and_missing_final_newline(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "\xc3\xbc"}')
    source = open_jsonl(str(path), shuffle=False)
    assert [source.entry(position).question for position in range(2)] == ["a", "ü"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', r"data\.jsonl:3: not JSON"),
        ("[1]", r"data\.jsonl:3: expected a JSON object, got a list"),
        (
            '{"question": "x", "id": 1}',
            r"data\.jsonl:3: no key 'prompt'; the keys are: question, id\. Set .*prompt_field",
        ),
        ("{}", r"data\.jsonl:3: no key 'prompt'; the keys are: none"),
        ('{"prompt": ["x"]}', r"data\.jsonl:3: prompt: expected text that is not empty, got a list"),
        ('{"prompt": ""}', r"data\.jsonl:3: prompt: expected text that is not empty, got empty text"),
        ('{"prompt": "x", "answer": {"a": 1}}', r"data\.jsonl:3: answer: expected text or a number, got an object"),
        ('{"prompt": "x", "answer": true}', r"data\.jsonl:3: answer: .* got true or false"),
        ("[" * 100_000, r"data\.jsonl:3: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "data.jsonl", {"prompt": "fine"}, "", line)
    with pytest.raises(UserError, match=message):
        open_jsonl(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"data\.jsonl:2: not UTF-8"):
        open_jsonl(str(path))


def test_empty_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.source\.path: .*holds no entries; expected one JSON object per line"):
        open_jsonl(write(tmp_path / "empty.jsonl", "", "  "))
    with pytest.raises(UserError, match=r"data\.source\.path: cannot read .*missing\.jsonl: No such file"):
        open_jsonl(str(tmp_path / "missing.jsonl"))
    with pytest.raises(UserError, match=r"data\.source\.path: cannot read .*: Is a directory"):
        open_jsonl(str(tmp_path))


def test_a_file_changed_under_the_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    source = open_jsonl(numbered(path, 2), shuffle=False)
    path.write_text("x" * 200)
    with pytest.raises(UserError, match=r"data\.jsonl:2: not JSON"):
        source.entry(1)

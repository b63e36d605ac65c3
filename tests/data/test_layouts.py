from __future__ import annotations

from typing import Any

import pytest

from laminar.config.data_schema import JsonlSource
from laminar.data.layouts import entry_of, last_boxed
from laminar.data.source import Entry, Message
from laminar.errors import UserError


def entry(row: dict[str, Any], **keys: object) -> Entry:
    source = JsonlSource.model_validate({"type": "jsonl", "path": "data.jsonl", **keys})
    return entry_of(source, "data.jsonl", row, "data.jsonl:3", "data.source")


def test_fields_of_ones_own() -> None:
    first = entry({"prompt": "2 + 3?", "answer": 5, "level": "easy", "tests": [1, 2]})
    assert (first.question, first.answer, first.source) == ("2 + 3?", "5", "data.jsonl")
    assert first.metadata == {"level": "easy", "tests": [1, 2]}
    assert entry({"prompt": "half?", "answer": 0.5}).answer == "0.5"
    assert entry({"prompt": "no answer"}).answer == ""
    assert entry({"prompt": "null answer", "answer": None}).answer == ""
    other = entry({"q": "why?", "a": "so", "prompt": "other"}, prompt_field="q", answer_field="a")
    assert (other.question, other.answer, other.metadata) == ("why?", "so", {"prompt": "other"})


def test_conversations() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "and 3?"},
    ]
    made = entry({"prompt": messages, "answer": "7"})
    assert made.question == "and 3?"
    assert made.history == tuple(Message(role=m["role"], content=m["content"]) for m in messages[:3])


# Made-up rows in the columns of the public data sets.
GSM8K = {
    "question": "Ann has 1,000 nuts and eats 4. How many are left?",
    "answer": "1000 - 4 = <<1000-4=996>>996\n#### 1,996",
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve: 2x = 6.", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "3", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "abc"},
}
PUBLIC = [
    ("gsm8k", GSM8K, GSM8K["question"], "1996"),
    ("dapo_math_17k", DAPO, "Solve: 2x = 6.", "3"),
    ("dapo_math_17k", {"prompt": "Solve: x = 1.", "solution": "1", "ability": "MATH"}, "Solve: x = 1.", "1"),
    ("verl", DAPO, "Solve: 2x = 6.", "3"),
    ("aime", {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 204}, "p", "204"),
    ("aime", {"id": 0, "problem": "p", "answer": "070"}, "p", "070"),
    ("aime", {"id": 0, "problem": "p", "solution": "so \\boxed{70}."}, "p", "70"),
    ("aime", {"question": "p", "answer": "70"}, "p", "70"),
    ("math", {"problem": "p", "level": "1", "solution": "\\boxed{1}, no: \\boxed{\\frac{1}{2}}."}, "p", "\\frac{1}{2}"),
    ("math", {"problem": "p", "solution": "long", "answer": "(3, \\pi)"}, "p", "(3, \\pi)"),
]


@pytest.mark.parametrize(("layout", "row", "question", "answer"), PUBLIC)
def test_public_layouts(layout: str, row: dict[str, Any], question: str, answer: str) -> None:
    made = entry(row, format=layout, name="mine")
    assert (made.source, made.question, made.answer, made.history) == ("mine", question, answer, ())


def test_nothing_of_a_row_is_lost() -> None:
    assert entry(GSM8K, format="gsm8k").metadata == {"solution": GSM8K["answer"]}
    assert entry(DAPO, format="verl").metadata == {name: value for name, value in DAPO.items() if name != "prompt"}
    row = {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 204}
    assert entry(row, format="aime").metadata == {"ID": "2024-I-1", "Solution": "s"}


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        (
            {"question": "x", "id": 1},
            {},
            r"no key 'prompt'; the keys are: question, id\. Set data\.source\.prompt_field",
        ),
        ({}, {}, r"no key 'prompt'; the keys are: none"),
        ({"prompt": ["x"]}, {}, r"prompt: expected text that is not empty, or a list of chat messages .*, got a list"),
        ({"prompt": ""}, {}, r"prompt: expected text that is not empty.* got empty text"),
        ({"prompt": [{"role": "user"}]}, {}, r"prompt: expected .*got a list"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, {}, r"the last chat message is the assistant's"),
        ({"prompt": "x", "answer": {"a": 1}}, {}, r"answer: expected text or a number, got an object"),
        ({"prompt": "x", "answer": True}, {}, r"answer: .* got true or false"),
        (
            {"prompt": "x", "answer": "1"},
            {"format": "gsm8k"},
            r"format gsm8k needs the columns question; there are: prompt, answer",
        ),
        (
            {"text": "x"},
            {"format": "aime"},
            r"needs the columns problem or question, answer or solution; there are: text",
        ),
        ({"question": "x", "answer": "5"}, {"format": "gsm8k"}, r"answer: expected text with `#### ` .*, got '5'"),
        ({"problem": "x", "solution": "5"}, {"format": "math"}, r"solution: expected text with .boxed.* got '5'"),
        (
            {"prompt": "x", "reward_model": {}},
            {"format": "verl"},
            r"reward_model: expected a mapping with `ground_truth`",
        ),
    ],
)
def test_rows_that_do_not_fit(row: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"^data\.jsonl:3: .*" + message):
        entry(row, **keys)


def test_last_boxed() -> None:
    assert last_boxed("a \\boxed{1} b \\boxed{ {2} } c") == "{2}"
    assert last_boxed("\\boxed{1") is None
    assert last_boxed("none") is None

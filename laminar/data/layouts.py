r"""Column layouts: from a row of a file to an entry. Those of public data sets go by name (`data.source.format`).

| format | columns | answer |
| --- | --- | --- |
| `fields` | `prompt_field`, `answer_field` | as it is |
| `gsm8k` | question, answer | what follows `####`, without commas (openai/gsm8k) |
| `dapo_math_17k` | prompt (messages or text), reward_model.ground_truth or solution | as it is (BytedTsinghua-SIA/DAPO-Math-17k, open-r1/DAPO-Math-17k-Processed) |
| `aime` | problem or question, answer | as it is; else the last `\boxed{}` of the solution (Maxwell-Jia/AIME_2024, math-ai/aime25, opencompass/AIME2025, ...) |
| `math` | problem, solution, answer | the answer; else the last `\boxed{}` of the solution (MATH, MATH-500) |
| `verl` | prompt (messages), reward_model.ground_truth | as it is; `extra_info`, `data_source`, ... become metadata |

Invariant: what is not the prompt or the answer is metadata, under its own name; nothing of a row is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from laminar.config.data_schema import FileSource
from laminar.data.jsonl_rows import kind_of
from laminar.data.source import Entry, Message
from laminar.errors import UserError

Read = Callable[[dict[str, Any]], tuple[Any, Any, dict[str, Any]]]
"""From a row to prompt, answer and metadata; raises `BadRow`."""

ROLES = ("system", "user", "assistant", "tool", "developer")


class BadRow(Exception):
    """What is wrong with a row, in words."""


def entry_of(config: FileSource, title: str, row: dict[str, Any], where: str, key: str) -> Entry:
    """The entry in a row.

    Args:
        config: the source, with the layout and the names of the columns.
        title: name of the file, where the source has none of its own.
        row: the row.
        where: file and line, for messages.
        key: dotted key of the source, for messages.

    Raises:
        UserError: a column is missing or holds what it must not; names the columns that are there.
    """
    try:
        if config.format == "fields":
            prompt, answer, metadata = _fields(row, config.prompt_field, config.answer_field, key)
        else:
            prompt, answer, metadata = LAYOUTS[config.format](row)
        *history, question = _messages(prompt, config.prompt_field if config.format == "fields" else "prompt")
        return Entry(
            source=config.name or title,
            question=question.content,
            history=tuple(history),
            answer=_answer(answer, config.answer_field if config.format == "fields" else "answer"),
            metadata=metadata,
        )
    except BadRow as error:
        raise UserError(f"{where}: {error}") from error


def _fields(row: dict[str, Any], prompt: str, answer: str, key: str) -> tuple[Any, Any, dict[str, Any]]:
    if prompt not in row:
        raise BadRow(
            f"no key {prompt!r}; the keys are: {_names(row)}. Set {key}.prompt_field to the prompt's, or {key}.format to a "
            "layout"
        )
    return row[prompt], row.get(answer), _rest(row, prompt, answer)


def _gsm8k(row: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    question, solution = _columns("gsm8k", row, ("question",), ("answer",))
    if not isinstance(solution, str) or "####" not in solution:
        raise BadRow(f"answer: expected text with `#### ` before the final answer (gsm8k), got {str(solution)[-80:]!r}")
    metadata = _rest(row, "question", "answer") | {"solution": solution}
    return question, solution.rpartition("####")[2].strip().replace(",", ""), metadata


def _dapo_math_17k(row: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    if isinstance(row.get("reward_model"), dict):
        return _verl_row("dapo_math_17k", row)
    prompt, answer = _columns("dapo_math_17k", row, ("prompt",), ("solution", "answer"))
    return prompt, answer, _rest(row, "prompt")


def _verl(row: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    return _verl_row("verl", row)


def _verl_row(layout: str, row: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    prompt, reward_model = _columns(layout, row, ("prompt",), ("reward_model",))
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise BadRow(f"reward_model: expected a mapping with `ground_truth` ({layout}), got {str(reward_model)[:80]}")
    return prompt, reward_model["ground_truth"], _rest(row, "prompt")


def _aime(row: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    return _problem("aime", row)


def _math(row: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    return _problem("math", row)


def _problem(layout: str, row: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """A problem with its answer, or with a solution that ends in a box."""
    names = {name.lower(): name for name in row}  # AIME_2024 writes Problem, Answer, MATH problem, answer
    problem, _ = _columns(layout, row, ("problem", "question"), ("answer", "solution"))
    answer = row.get(names.get("answer", ""))
    if answer is None:
        solution = row.get(names.get("solution", ""))
        answer = last_boxed(str(solution))
        if answer is None:
            raise BadRow(f"solution: expected text with \\boxed{{...}} ({layout}), got {str(solution)[-80:]!r}")
    return problem, answer, _rest(row, names.get("problem", ""), names.get("question", ""), names.get("answer", ""))


LAYOUTS: dict[str, Read] = {
    "gsm8k": _gsm8k,
    "dapo_math_17k": _dapo_math_17k,
    "aime": _aime,
    "math": _math,
    "verl": _verl,
}


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{}` with its braces balanced; None where there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[start:index].strip()
    return None


def _columns(layout: str, row: dict[str, Any], *wanted: Sequence[str]) -> list[Any]:
    """The first present of each tuple of names, upper and lower case alike."""
    names = {name.lower(): name for name in row}
    found, missing = [], []
    for alternatives in wanted:
        name = next((names[lower] for lower in alternatives if lower in names), None)
        if name is None:
            missing.append(" or ".join(alternatives))
        else:
            found.append(row[name])
    if missing:
        raise BadRow(f"format {layout} needs the columns {', '.join(missing)}; there are: {_names(row)}")
    return found


def _messages(prompt: Any, column: str) -> list[Message]:
    """A text as the one message of the user; or chat messages, the last of them the user's."""
    if isinstance(prompt, str) and prompt:
        return [Message(role="user", content=prompt)]
    if not isinstance(prompt, list) or not prompt or not all(_is_message(item) for item in prompt):
        raise BadRow(
            f"{column}: expected text that is not empty, or a list of chat messages (role, content), got {kind_of(prompt)}"
        )
    messages = [Message(role=item["role"], content=item["content"]) for item in prompt]
    if messages[-1].role != "user":
        raise BadRow(f"{column}: the last chat message is the {messages[-1].role}'s; expected the user's")
    return messages


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ROLES
        and isinstance(value.get("content"), str)
        and value["content"] != ""
    )


def _answer(value: Any, column: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)
    raise BadRow(
        f"{column}: expected text or a number, got {kind_of(value)}. Under another key it may be anything: rewards get it "
        "as metadata"
    )


def _rest(row: dict[str, Any], *without: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in without}


def _names(row: dict[str, Any]) -> str:
    return ", ".join(row) or "none"

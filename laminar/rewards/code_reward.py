"""The reward `code`: the program in a response passes its tests, run in the sandbox.

Invariant: nothing of the model's runs outside the sandbox, and ending early is no way to pass: a program with assertions
counts only if it got past the last of them, which it shows by a word that is drawn for each call.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laminar.environments.sandbox import SandboxLimits, run_python

_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(kw_only=True, slots=True, frozen=True)
class CodeTest:
    """One test: text in and out, or statements that follow the program."""

    stdin: str = ""
    stdout: str | None = None  # None: the statements decide
    statements: str = ""


class CodeReward:
    """Runs a response's program against the tests that came with its prompt."""

    def __init__(self, *, tests_field: str, partial: bool, limits: SandboxLimits) -> None:
        """
        Args:
            tests_field: metadata key of the tests; "answer": they are the answer.
            partial: the score is the share of tests passed; else all or nothing.
            limits: of each test.
        """
        self._tests_field = tests_field
        self._partial = partial
        self._limits = limits

    async def __call__(self, *, response: str, answer: str, metadata: dict[str, Any]) -> float:
        """Share of tests passed, or 1 for all and 0 for less.

        Raises:
            ValueError: there are no tests, or they are not in a form of `read_tests`.
            SandboxError: the program could not be run.
        """
        tests = read_tests(find_tests(self._tests_field, answer, metadata))
        program = extract_code(response)
        passed = 0
        for test in tests:
            if await self._passes(program, test):
                passed += 1
            elif not self._partial:
                return 0.0
        return passed / len(tests)

    async def _passes(self, program: str, test: CodeTest) -> bool:
        if test.stdout is not None:
            result = await run_python(program, stdin=test.stdin, limits=self._limits)
            return result.ok and _lines(result.stdout) == _lines(test.stdout)
        word = secrets.token_hex(16)
        result = await run_python(f"{program}\n\n{test.statements}\nprint('\\n{word}')\n", limits=self._limits)
        return result.ok and result.stdout.rstrip("\n").endswith(f"\n{word}")


def extract_code(response: str) -> str:
    """The last fenced block of a response; without a fence, all of it."""
    blocks = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def find_tests(field: str, answer: str, metadata: dict[str, Any]) -> Any:
    """The tests as the data holds them.

    Raises:
        ValueError: there is no such key; names those that there are.
    """
    if field == "answer":
        return answer
    if field not in metadata:
        raise ValueError(f"no tests under the key {field!r}; the keys are: {', '.join(metadata) or 'none'}")
    return metadata[field]


def read_tests(value: Any) -> Sequence[CodeTest]:
    """Tests in one of the forms that public data sets have.

    - statements as text, or a list of them (`assert add(2, 3) == 5`; HumanEval, MBPP): each text is a test;
    - a list of mappings with `input` and `output`: what the program reads and is to print;
    - a mapping with the lists `inputs` and `outputs` (APPS, TACO, PRIME);
    - JSON text of one of these.

    Raises:
        ValueError: it is none of them, or empty.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
    if isinstance(value, dict) and isinstance(value.get("inputs"), list) and isinstance(value.get("outputs"), list):
        if value.get("fn_name"):
            raise ValueError("tests that call a function by name (`fn_name`) are not known; write them as assertions")
        if len(value["inputs"]) != len(value["outputs"]):
            raise ValueError(f"{len(value['inputs'])} inputs, but {len(value['outputs'])} outputs")
        value = [{"input": i, "output": o} for i, o in zip(value["inputs"], value["outputs"], strict=True)]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected tests (statements, or inputs and outputs), got {value!r:.80}")
    return [_read_test(item) for item in value]


def _read_test(item: Any) -> CodeTest:
    if isinstance(item, str) and item.strip():
        return CodeTest(statements=item)
    if isinstance(item, dict) and isinstance(item.get("input"), str) and isinstance(item.get("output"), str):
        return CodeTest(stdin=item["input"], stdout=item["output"])
    raise ValueError(f"expected a test (statements, or a mapping with the texts input and output), got {item!r:.80}")


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]

from __future__ import annotations

import json
from typing import Any

import pytest

from laminar.environments.sandbox import SandboxLimits
from laminar.rewards.code_reward import CodeReward, CodeTest, extract_code, read_tests

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ECHO = "```\nfor _ in range(int(input())):\n    print(input(), ' ')\n```"
ASSERTS = ["assert add(2, 3) == 5", "assert add('a', 'b') == 'ab'"]


async def score(response: str, tests: Any, **keys: Any) -> float:
    given = {"tests_field": "tests", "partial": False, "limits": SandboxLimits(time_s=3.0), **keys}
    return await CodeReward(**given)(response=response, answer="", metadata={"tests": tests, "level": 1})


async def test_assertions() -> None:
    assert await score(ADD, ASSERTS) == 1.0
    assert await score(ADD, [*ASSERTS, "assert add(1, 1) == 3"]) == 0.0
    assert await score(ADD, [*ASSERTS, "assert add(1, 1) == 3"], partial=True) == pytest.approx(2 / 3)
    assert await score("no program at all", ASSERTS) == 0.0


async def test_inputs_and_outputs() -> None:
    assert await score(ECHO, [{"input": "2\na\nb\n", "output": "a\nb"}]) == 1.0
    assert await score(ECHO, json.dumps({"inputs": ["1\na\n"], "outputs": ["b\n"]})) == 0.0


@pytest.mark.parametrize(
    "program", ["raise SystemExit(0)", "import os\nos._exit(0)", "while True: pass", "print('x' * 10**7)\nos._exit(0)"]
)
async def test_ending_early_or_never_is_no_way_to_pass(program: str) -> None:
    limits = SandboxLimits(time_s=1.0)
    assert await score(f"```python\n{program}\n```", ["assert False"], limits=limits) == 0.0


def test_the_last_fenced_block_is_the_program() -> None:
    assert extract_code("```python\na\n```\nno:\n```py\nb\n```\n```unfinished") == "b\n"
    assert extract_code("print(1)") == "print(1)"


def test_forms_of_tests() -> None:
    assert read_tests("assert f() == 1\nassert f() > 0") == [CodeTest(statements="assert f() == 1\nassert f() > 0")]
    assert read_tests('["assert f()"]') == [CodeTest(statements="assert f()")]
    assert read_tests([{"input": "1", "output": "2"}]) == [CodeTest(stdin="1", stdout="2")]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], r"expected tests .*got \[\]"),
        (3, r"expected tests .*got 3"),
        ([3], r"expected a test .*got 3"),
        ([{"input": "1"}], r"expected a test .*got \{'input': '1'\}"),
        ({"inputs": ["1"], "outputs": []}, r"1 inputs, but 0 outputs"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f"}, r"fn_name"),
    ],
)
def test_what_is_no_test(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(tests)


async def test_missing_tests_name_the_columns_that_are_there() -> None:
    with pytest.raises(ValueError, match=r"no tests under the key 'cases'; the keys are: tests, level"):
        await score(ADD, ASSERTS, tests_field="cases")

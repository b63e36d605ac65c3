"""`python_tool`: which turns are calls, and what the model reads of them."""

import pytest

from laminar.environments.environment import EnvironmentPrompt
from laminar.environments.python_tool import PythonTool
from laminar.environments.sandbox import SandboxLimits

PROMPT = EnvironmentPrompt(text="?", answer="", metadata={}, source="test")


async def step(response, limits=None, **params):
    tool = PythonTool(sandbox=limits or SandboxLimits(), **params)
    assert await tool.reset(PROMPT) is None
    return await tool.step(response)


async def test_code_between_the_markers_is_run_and_its_output_comes_back():
    answer = await step("Let me see. <code>print(6 * 7)</code>")
    assert (answer.observation, answer.done, answer.reward) == ("<output>42</output>", False, 0.0)


async def test_a_turn_without_a_call_is_the_last():
    assert (await step("It is 42.")).done
    assert (await step("<code>print(1)</code> gives 1.")).done


async def test_only_the_last_block_is_run():
    assert (await step("<code>print(1)</code> or <code>print(2)</code>")).observation == "<output>2</output>"


async def test_markers_can_be_others():
    answer = await step(
        "```python\nprint('x')\n```", code_start="```python\n", code_end="```", output_start="\nOut:\n", output_end="\n"
    )
    assert answer.observation == "\nOut:\nx\n"


async def test_code_without_a_beginning_is_said_to_have_none():
    assert (await step("print(1)</code>")).observation == "<output>error: there is no <code> before </code></output>"


async def test_errors_are_shown():
    answer = await step("<code>print(1)\n1 / 0</code>")
    assert answer.observation.startswith("<output>1\nTraceback") and "ZeroDivisionError" in answer.observation
    assert (await step("<code>raise SystemExit(3)</code>")).observation == "<output>error: exit code 3</output>"


@pytest.mark.parametrize(
    ("code", "limits", "said"),
    [
        ("while True: pass", SandboxLimits(time_s=0.3), "error: it took longer than 0.3 s"),
        ("while True: print('x' * 1000)", SandboxLimits(output_bytes=1 << 10), "error: it printed more than 1 KiB"),
    ],
)
async def test_the_limit_that_was_exceeded_is_named(code, limits, said):
    assert (await step(f"<code>{code}</code>", limits)).observation.endswith(f"{said}</output>")

"""`python_tool`: the model writes Python between two markers, and reads what it prints (ReTool, arXiv 2504.11536).

A turn that ends with the end marker is a call; any other is the answer, and the last turn. Every call is a program of its own:
nothing of an earlier one is left.
"""

from __future__ import annotations

from laminar.environments.environment import EnvironmentPrompt, Step
from laminar.environments.sandbox import SandboxLimits, SandboxResult, run_python

CODE_END = "</code>"


class PythonTool:
    """Runs code in the sandbox."""

    def __init__(
        self,
        *,
        sandbox: SandboxLimits,
        code_start: str = "<code>",
        code_end: str = CODE_END,
        output_start: str = "<output>",
        output_end: str = "</output>",
    ) -> None:
        """The markers may hold line breaks and spaces; the model reads and writes them as they are."""
        self._sandbox = sandbox
        self._code_start, self._code_end = code_start, code_end
        self._output_start, self._output_end = output_start, output_end

    async def reset(self, prompt: EnvironmentPrompt) -> str | None:
        """There is nothing to say before the first turn."""
        return None

    async def step(self, response: str) -> Step:
        """Run the code of a turn that ends in some."""
        if not response.endswith(self._code_end):
            return Step(done=True)
        _, start, code = response.removesuffix(self._code_end).rpartition(self._code_start)
        if start:
            text = describe(await run_python(code, limits=self._sandbox), self._sandbox)
        else:
            text = f"error: there is no {self._code_start.strip()} before {self._code_end.strip()}"
        return Step(observation=f"{self._output_start}{text}{self._output_end}")

    async def close(self) -> None:
        """Nothing is held between two turns."""


def describe(result: SandboxResult, limits: SandboxLimits) -> str:
    """What the model reads of a call: its output, its errors, and the limit that it went beyond."""
    parts = [result.stdout.strip("\n"), result.stderr.strip("\n")]
    match result.ended_by:
        case "time":
            parts.append(f"error: it took longer than {limits.time_s:g} s")
        case "memory":
            parts.append(f"error: it took more than {limits.memory_bytes >> 20} MiB of memory")
        case "processes":
            parts.append(f"error: it started more than {limits.processes} processes")
        case "output":
            parts.append(f"error: it printed more than {limits.output_bytes >> 10} KiB")
        case "exit":
            if result.exit_code and not result.stderr:
                parts.append(f"error: exit code {result.exit_code}")
    return "\n".join(part for part in parts if part)

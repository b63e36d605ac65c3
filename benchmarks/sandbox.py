"""What one call of the sandbox costs: `python -m benchmarks.sandbox [--calls 30]`.

CPU seconds, because a busy machine makes wall-clock figures mean little; and as a multiple of what starting Python alone costs.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
from collections.abc import Callable

from laminar.environments.sandbox import SandboxLimits, run_python


def cpu_ms(call: Callable[[], object], calls: int) -> float:
    """Milliseconds of CPU that children take in one call."""

    def children() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = children()
    for _ in range(calls):
        call()
    return (children() - before) / calls * 1e3


def main() -> None:
    """Print a line for each way to run the same program."""
    parser = argparse.ArgumentParser(description="What one call of the sandbox costs.")
    parser.add_argument("--calls", type=int, default=30, help="of each kind (default: %(default)s)")
    calls = parser.parse_args().calls
    alone = cpu_ms(lambda: subprocess.run([sys.executable, "-I", "-c", "print(1)"], capture_output=True), calls)
    print(f"python alone         {alone:6.1f} ms of CPU")
    for name, use_namespaces in (("with namespaces", True), ("without namespaces", False)):
        limits = SandboxLimits(use_namespaces=use_namespaces)
        taken = cpu_ms(lambda limits=limits: asyncio.run(run_python("print(1)", limits=limits)), calls)  # type: ignore[misc]
        print(f"sandbox, {name:18} {taken:6.1f} ms of CPU, {taken / alone:.1f} x python alone")


if __name__ == "__main__":
    main()

"""The arrows between the packages, and what the controller's process never imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import laminar

ROOT = Path(laminar.__file__).parent
HEAVY = ("torch", "vllm", "transformers", "mpi4py", "accelerate")

# package -> the parts of laminar that it may import
ALLOWED = {
    "algorithms": set(),
    "config": {"errors", "weights"},
    "controller": {"protocol", "trajectory", "config", "observability", "evaluation_result", "errors"},
    "data": {"config", "errors"},
    "environments": {"errors", "config", "data"},
    "observability": {"config", "protocol", "trajectory", "evaluation_result", "errors"},
    "protocol": {"errors"},
    "rewards": {"errors", "config", "data", "environments"},
    "simulation": {"config", "controller", "errors", "launch", "observability", "protocol", "trajectory"},
    "weights": {"errors"},
    "workers": {"config", "errors", "protocol", "weights", "algorithms", "data", "rewards", "environments"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_lies_below_it(package):
    wrong = []
    for path in (ROOT / package).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "laminar" and len(parts) > 1 and parts[1] not in {package, *ALLOWED[package], "__version__"}:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


@pytest.mark.parametrize("module", ["laminar.cli", "laminar.launch.train", "laminar.attach", "laminar.config.command"])
def test_the_controllers_process_never_imports_what_only_workers_need(module):
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"

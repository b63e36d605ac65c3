from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "vllm", "transformers", "mpi4py", "accelerate", "reasoning_gym")

PROGRAM = f"""
import sys
import laminar.config.checks, laminar.config.command, laminar.config.load, laminar.config.reference
from laminar.config.machine import engine_taken, find_mpirun, has_nvidia_gpu
from laminar.config.schema import RolloutConfig
engine_taken(RolloutConfig()), find_mpirun(), has_nvidia_gpu()
print([name for name in {HEAVY} if name in sys.modules])
"""


def test_the_config_package_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

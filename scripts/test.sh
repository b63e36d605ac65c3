#!/usr/bin/env bash
# Linter, formatter, type checker and tests, in an environment that is made if it is not there.
#
#   bash scripts/test.sh [options of pytest, for example tests/config -k overrides]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh --dev
SECONDS=0
step() {
    printf '[test %3d s] %s\n' "$SECONDS" "$*"
    "$@"
}
bin=.venv/bin
step $bin/ruff check .
step $bin/ruff format --check .
step $bin/mypy laminar benchmarks
step $bin/python -m pytest -q "$@"
printf '[test %3d s] done\n' "$SECONDS"

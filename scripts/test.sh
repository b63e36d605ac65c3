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
if [ $# -gt 0 ]; then
    step $bin/python -m pytest -q "$@"
else
    # Real runs wait a third of their time: all other tests run beside them, and are printed after them.
    others=$(mktemp)
    # Bash lets its background jobs ignore Ctrl-C: not this one, which has processes of its own to end.
    env --default-signal=INT $bin/python -m pytest -q --ignore tests/launch > "$others" 2>&1 &
    trap 'kill -INT %1' TERM
    trap 'wait; rm -f "$others"' EXIT
    status=0
    step $bin/python -m pytest -q tests/launch || status=$?
    printf '[test %3d s] %s\n' "$SECONDS" "$bin/python -m pytest -q --ignore tests/launch, begun with these"
    wait %1 || status=$?
    cat "$others"
    [ "$status" = 0 ] || exit "$status"
fi
printf '[test %3d s] done\n' "$SECONDS"

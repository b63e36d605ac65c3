#!/usr/bin/env bash
# What the launch scripts share; sourced by them. Sets `python`, `run_dir` and the workers' environment.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${LAMINAR_PYTHON:-$root/.venv/bin/python}

die() { echo "$(basename "$0"): $*" >&2; exit 2; }

# Print the comment at the top of the calling script.
usage() { sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0" >&2; exit 2; }

# Wait until the controller has published its address in RUN_DIR, for WAIT_S seconds (300 if not set).
join_run() {
    [ -x "$(command -v "$python")" ] || die "LAMINAR_PYTHON: $python; expected the python of Laminar's environment (run scripts/setup.sh)"
    run_dir=$1
    local limit=${WAIT_S:-300} waited=0
    until [ -f "$run_dir/connection.json" ]; do
        [ "$waited" != 0 ] || echo "$(basename "$0"): waiting up to $limit s for $run_dir/connection.json" >&2
        [ "$waited" -lt "$limit" ] || die "$run_dir/connection.json did not appear within $limit s; is the controller \
(laminar train ... --run-dir $run_dir) running, and is this a file system that both hosts see?"
        sleep 1
        waited=$((waited + 1))
    done
    run_dir=$(cd "$run_dir" && pwd)
    export LAMINAR_LOG_DIR=${LAMINAR_LOG_DIR:-$run_dir/logs} # a file per worker, beside the controller's own
    export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # the user's own reward functions
    mkdir -p "$LAMINAR_LOG_DIR"
}

# Value of a key of connection.json.
connection() { "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$run_dir/connection.json" "$1"; }

# start_workers FIRST COUNT FUNCTION: run FUNCTION for each index in the background, pass signals on, and wait for all of them.
# The status is that of the first worker that failed.
start_workers() {
    local index pid code status=0
    local -a pids=()
    for ((index = $1; index < $1 + $2; index++)); do
        "$3" "$index" &
        pids+=($!)
    done
    # shellcheck disable=SC2064 # the pids of now
    trap "kill ${pids[*]} 2>/dev/null || true" TERM INT
    for pid in "${pids[@]}"; do
        wait "$pid" || {
            code=$?
            [ "$status" != 0 ] || status=$code
        }
    done
    wait # a signal ends the wait above before the workers have ended
    return "$status"
}

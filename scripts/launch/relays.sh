#!/usr/bin/env bash
# Start the relays of a run with mpirun, one per host; or a single relay without it. The trainer's host comes first, because
# relay 0 is the master relay.
#
#   relays.sh RUN_DIR COUNT [HOSTFILE]
#   relays.sh RUN_DIR --index INDEX
#
# RUN_DIR   the controller's run directory, on a file system that all hosts see
# COUNT     relay.count of the config
# HOSTFILE  a host per line, the trainer's first; without it all relays run on this host
# INDEX     of one relay, to be started on this host: it joins a running run or takes a lost relay's place, and uses TCP alone.
#           With relay.transport: tcp all relays are started so
#
# When mpirun, or its daemon on a host, is killed, all its relays end; while the run lives they are started again.
# The controller is `laminar train CONFIG --run-dir RUN_DIR --set launch.relays=manual`.
# MPI_OPTIONS  more options for mpirun (network interfaces, an ssh agent); docs/mpi.md has some
# FAULT_TOLERANT=0  plain MPI instead of ULFM: the fast RDMA path, but the death of one relay then ends (and restarts) them all
# RESTARTS  how often in a row they are started again (3); a minute of life ends the row
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# = 2 ] || [ $# = 3 ] || usage

join_run "$1"
if [ "$2" = --index ]; then
    [ $# = 3 ] || usage
    status=0 run_id=$(connection run_id)
    "$python" -m laminar.workers.relay.main --connect "$run_dir" --index "$3" || status=$?
    # On a host without the controller the folder in shared memory is the relay's own; a relay that died leaves it to its
    # successor. `claim` fails where the folder is another live process's.
    [ "$status" != 0 ] || "$python" -c 'import sys; from laminar.weights import run_memory as memory
memory.claim(sys.argv[1]); memory.remove(sys.argv[1])' "$run_id" 2>/dev/null || true
    exit "$status"
fi

count=$2
hosts=(--oversubscribe)
if [ $# = 3 ]; then
    [ -f "$3" ] || die "$3: no such hostfile"
    lines=$(grep -cv '^ *\(#.*\)\?$' "$3" || true)
    [ "$lines" -ge "$count" ] || die "$3: $lines hosts for $count relays; expected one host per relay"
    hosts=(--hostfile "$3" --map-by ppr:1:node)
fi
fault_tolerance=(--with-ft ulfm) check=()
[ "${FAULT_TOLERANT:-1}" = 1 ] || fault_tolerance=() check=(--without-fault-tolerance)
"$python" -m laminar.config.mpi_installation "${check[@]}" || exit 2
mpirun=$(dirname "$python")/mpirun
[ -x "$mpirun" ] || mpirun=$(command -v mpirun)
[ "$(id -u)" != 0 ] || hosts+=(--allow-run-as-root)
# shellcheck disable=SC2206 # words
options=("${hosts[@]}" --bind-to none -n "$count" ${MPI_OPTIONS:-})

# What relays and Open MPI keep in a host's shared memory lies in one folder. Where the controller does not remove it (it leaves an
# `owner` file where it does), this script does when the relays have ended.
run_id=$(connection run_id)
folder=/dev/shm/laminar-$run_id
clean_up() { "$mpirun" "${options[@]}" sh -c "[ -e $folder/owner ] || rm -rf $folder" >/dev/null 2>&1 || true; }
trap clean_up EXIT

# start_world ATTEMPT: relays that were killed leave segments of MPI behind, hence a folder for each attempt.
start_world() {
    "$mpirun" "${fault_tolerance[@]}" "${options[@]}" --mca btl_sm_backing_directory "$folder/mpi-$1" \
        -x LAMINAR_LOG_DIR -x PYTHONUNBUFFERED -x TOKENIZERS_PARALLELISM -x PYTHONPATH \
        sh -c "umask 077 && rm -rf '$folder/mpi-$(($1 - 1))'; mkdir -p '$folder/mpi-$1' && exec \"\$0\" \"\$@\"" \
        "$python" -m laminar.workers.relay.main --connect "$run_dir" &
    world=$!
}

# Whether the controller of this run is still there.
run_is_alive() {
    [ -f "$run_dir/connection.json" ] && [ "$(connection run_id)" = "$run_id" ] &&
        "$python" -c 'import socket, sys; socket.create_connection(sys.argv[1].removeprefix("tcp://").rsplit(":", 1), timeout=5)' \
            "$(connection address)" 2>/dev/null
}

stopped=0 attempt=0 row=0
trap 'stopped=1; kill "$world" 2>/dev/null || true' TERM INT
while true; do
    started=$SECONDS status=0
    start_world "$attempt"
    while kill -0 "$world" 2>/dev/null; do # a signal ends `wait` before mpirun has ended
        status=0
        wait "$world" || status=$?
    done
    [ "$status" != 0 ] && [ "$stopped" = 0 ] && run_is_alive || exit "$status"
    [ $((SECONDS - started)) -lt 60 ] || row=0
    [ "$row" -lt "${RESTARTS:-3}" ] ||
        { echo "relays.sh: mpirun ended with status $status; RESTARTS ($row) are used up" >&2 && exit "$status"; }
    row=$((row + 1)) attempt=$((attempt + 1))
    echo "relays.sh: mpirun ended with status $status, but the run is alive: starting the relays again" >&2
done

#!/usr/bin/env bash
# Start the relays of a run with mpirun: one per host. The trainer's host comes first, because relay 0 is the master relay.
#
#   relays.sh RUN_DIR COUNT [HOSTFILE]
#
# RUN_DIR   the controller's run directory, on a file system that all hosts see
# COUNT     relay.count of the config
# HOSTFILE  a host per line, the trainer's first; without it all relays run on this host
#
# The controller is `laminar train CONFIG --run-dir RUN_DIR --set launch.relays=manual`.
# MPI_OPTIONS  more options for mpirun (network interfaces, an ssh agent); docs/cluster.md has some
# FAULT_TOLERANT=0  plain MPI instead of ULFM: the fast RDMA path, but the death of one relay then ends them all
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# = 2 ] || [ $# = 3 ] || usage

join_run "$1"
count=$2
hosts=(--oversubscribe)
if [ $# = 3 ]; then
    [ -f "$3" ] || die "$3: no such hostfile"
    lines=$(grep -cv '^ *\(#.*\)\?$' "$3" || true)
    [ "$lines" -ge "$count" ] || die "$3: $lines hosts for $count relays; expected one host per relay"
    hosts=(--hostfile "$3" --map-by ppr:1:node)
fi
mpirun=$(dirname "$python")/mpirun
[ -x "$mpirun" ] || mpirun=$(command -v mpirun) || die "no mpirun; install the extra cpu or gpu (scripts/setup.sh)"
fault_tolerance=(--with-ft ulfm)
[ "${FAULT_TOLERANT:-1}" = 1 ] || fault_tolerance=()
[ "$(id -u)" != 0 ] || hosts+=(--allow-run-as-root)
# shellcheck disable=SC2206 # words
options=("${hosts[@]}" --bind-to none -n "$count" ${MPI_OPTIONS:-})

# What relays and Open MPI keep in a host's shared memory lies in one folder. Where the controller does not remove it (it leaves an
# `owner` file where it does), this script does when the relays have ended.
folder=/dev/shm/laminar-$(connection run_id)
clean_up() { "$mpirun" "${options[@]}" sh -c "[ -e $folder/owner ] || rm -rf $folder" >/dev/null 2>&1 || true; }
trap clean_up EXIT

"$mpirun" "${fault_tolerance[@]}" "${options[@]}" --mca btl_sm_backing_directory "$folder/mpi" \
    -x LAMINAR_LOG_DIR -x PYTHONUNBUFFERED -x TOKENIZERS_PARALLELISM -x PYTHONPATH \
    sh -c "umask 077 && mkdir -p '$folder/mpi' && exec \"\$0\" \"\$@\"" \
    "$python" -m laminar.workers.relay.main --connect "$run_dir"

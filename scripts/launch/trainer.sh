#!/usr/bin/env bash
# Start the trainer ranks of this host with torchrun. Run it once on every host of the trainer.
#
#   trainer.sh RUN_DIR RANKS_PER_HOST [HOSTS RENDEZVOUS]
#
# RUN_DIR         the controller's run directory, on a file system that all hosts see
# RANKS_PER_HOST  ranks to start here, one per GPU; times HOSTS it is trainer.ranks of the config
# HOSTS           number of hosts that the trainer spans (1)
# RENDEZVOUS      host:port of one of them, the same everywhere; any free port
#
# The controller is `laminar train CONFIG --run-dir RUN_DIR --set launch.trainer=manual`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# = 2 ] || [ $# = 4 ] || usage

join_run "$1"
if [ $# = 4 ]; then
    group=(--nnodes "$3" --rdzv-backend c10d --rdzv-endpoint "$4" --rdzv-id "$(connection run_id)")
else
    group=(--standalone)
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Without a place for logs torchrun makes a temporary folder, and leaves it there; each rank has its own log.
exec "$python" -m torch.distributed.run "${group[@]}" --log-dir /dev/null --nproc-per-node "$2" \
    -m laminar.workers.trainer.main --connect "$run_dir"

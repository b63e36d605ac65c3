#!/usr/bin/env bash
# Start rollout workers on this host, and wait for them. Where there are NVIDIA GPUs each gets its own.
#
#   rollouts.sh RUN_DIR COUNT [FIRST]
#
# RUN_DIR  the controller's run directory, on a file system that all hosts see
# COUNT    replicas on this host
# FIRST    index of the first; under Slurm COUNT times the task's number, else 0
#
# All hosts together: indices 0 to rollout.replicas - 1, each once.
# GPUS_PER_REPLICA  rollout.tensor_parallel of the config (1)
# The controller is `laminar train CONFIG --run-dir RUN_DIR --set launch.rollouts=manual`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# = 2 ] || [ $# = 3 ] || usage

join_run "$1"
count=$2
first=${3:-$((${SLURM_PROCID:-0} * count))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}"
per_replica=${GPUS_PER_REPLICA:-1}
[ ${#gpus[@]} = 0 ] || [ ${#gpus[@]} -ge $((count * per_replica)) ] ||
    die "$count replicas of $per_replica GPUs on a host with ${#gpus[@]}; start fewer here"

rollout() {
    if [ ${#gpus[@]} != 0 ]; then
        CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${gpus[*]:$((($1 - first) * per_replica)):$per_replica}")
        export CUDA_VISIBLE_DEVICES
    fi
    exec "$python" -m laminar.workers.rollout.main --connect "$run_dir" --index "$1"
}
start_workers "$first" "$count" rollout

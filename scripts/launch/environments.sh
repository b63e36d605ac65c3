#!/usr/bin/env bash
# Start environment workers (rewards) on this host, and wait for them. They use no GPU.
#
#   environments.sh RUN_DIR COUNT [FIRST]
#
# RUN_DIR  the controller's run directory, on a file system that all hosts see
# COUNT    workers on this host
# FIRST    index of the first; under Slurm COUNT times the task's number, else 0
#
# All hosts together: indices 0 to reward.workers - 1, each once.
# The controller is `laminar train CONFIG --run-dir RUN_DIR --set launch.environments=manual`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# = 2 ] || [ $# = 3 ] || usage

join_run "$1"
first=${3:-$((${SLURM_PROCID:-0} * $2))}
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" PYTHONHASHSEED=0

environment() { exec "$python" -m laminar.workers.environment.main --connect "$run_dir" --index "$1"; }
start_workers "$first" "$2" environment

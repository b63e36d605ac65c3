"""The command lines of everything that `laminar train` starts; `scripts/launch/` has the same for a cluster."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from laminar.config.machine import find_mpirun
from laminar.config.schema import ExperimentConfig
from laminar.protocol.connection import LOG_DIR_VARIABLE, RUN_ID_VARIABLE
from laminar.weights import run_memory

MPIRUN = "mpirun"  # name of the command that keeps the relays' world together


@dataclass(kw_only=True, slots=True, frozen=True)
class Command:
    """A process to start, and the workers that will dial in from it."""

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]  # added to the controller's own
    workers: tuple[str, ...]


def expected_workers(config: ExperimentConfig, *, evaluate_only: bool = False) -> list[str]:
    """Names of all workers of a run; `evaluate_only`: those that an evaluation alone needs."""
    training = [
        *(f"relay-{rank}" for rank in range(config.relay.count)),
        *(f"trainer-{rank}" for rank in range(config.trainer.ranks)),
    ]
    return [
        *([] if evaluate_only else training),
        *(f"rollout-{index}" for index in range(config.rollout.replicas)),
        *(f"environment-{index}" for index in range(config.reward.workers)),
    ]


def local_commands(config: ExperimentConfig, run_dir: Path, run_id: str) -> list[Command]:
    """Commands of the parts whose `launch` option is `local`."""
    commands: list[Command] = []
    common = common_environment(run_dir, run_id)
    if config.launch.relays == "local":
        commands += _relays(config, run_dir, common, mpi_directory(run_id))
    if config.launch.trainer == "local":
        commands.append(_trainer(config, run_dir, common))
    if config.launch.rollouts == "local":
        commands += [rollout_command(config, run_dir, common, index) for index in range(config.rollout.replicas)]
    if config.launch.environments == "local":
        commands += [environment_command(run_dir, common, index) for index in range(config.reward.workers)]
    return commands


def common_environment(run_dir: Path, run_id: str) -> dict[str, str]:
    """What every process of a run finds in its environment."""
    return {
        RUN_ID_VARIABLE: run_id,
        LOG_DIR_VARIABLE: str(run_dir / "logs"),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }


def mpi_directory(run_id: str) -> Path:
    """Where Open MPI keeps its own files in shared memory: inside the run's folder, so that they go with it."""
    return run_memory.run_directory(run_id) / "mpi"


def mpirun(directory: Path, ranks: int) -> list[str]:
    """mpirun for one fault-tolerant world on this machine, its own files in `directory`; the program is to follow."""
    flags = ["--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    flags += ["--prtemca", "prte_tmpdir_base", str(directory), "--mca", "btl_sm_backing_directory", str(directory)]
    return [str(find_mpirun() or "mpirun"), *flags, "-n", str(ranks)]


def _relays(config: ExperimentConfig, run_dir: Path, common: dict[str, str], directory: Path) -> list[Command]:
    """One mpirun for all, or, without MPI, a process each."""
    if config.relay.transport == "tcp":
        return [relay_command(run_dir, common, rank) for rank in range(config.relay.count)]
    relay = (sys.executable, "-m", "laminar.workers.relay.main", "--connect", str(run_dir))
    world = Command(
        name=MPIRUN,
        argv=(*mpirun(directory, config.relay.count), *relay),
        environment=common,
        workers=tuple(f"relay-{rank}" for rank in range(config.relay.count)),
    )
    return [world]


def relay_command(run_dir: Path, common: dict[str, str], rank: int) -> Command:
    """Command of one relay outside of any mpirun world: it is reached by TCP."""
    return Command(
        name=f"relay-{rank}",
        argv=(
            *(sys.executable, "-m", "laminar.workers.relay.main"),
            *("--connect", str(run_dir), "--index", str(rank)),
        ),
        environment=common,
        workers=(f"relay-{rank}",),
    )


def _trainer(config: ExperimentConfig, run_dir: Path, common: dict[str, str]) -> Command:
    return Command(
        name="torchrun",
        argv=(
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            # Without a place for logs torchrun makes a temporary folder, and leaves it there; each rank has its own log.
            *("--log-dir", os.devnull),
            *("--nproc-per-node", str(config.trainer.ranks), "-m", "laminar.workers.trainer.main"),
            *("--connect", str(run_dir)),
        ),
        environment={**common, "OMP_NUM_THREADS": str(config.trainer.threads), **_gpus(0, config.trainer.ranks)},
        workers=tuple(f"trainer-{rank}" for rank in range(config.trainer.ranks)),
    )


def rollout_command(config: ExperimentConfig, run_dir: Path, common: dict[str, str], index: int) -> Command:
    """Command of one rollout; one that is added to the run has an index of its own and shares the last GPU if none is left."""
    degree = config.rollout.degree(index)
    before = sum(config.rollout.degree(other) for other in range(index))
    first = (config.trainer.ranks if config.launch.trainer == "local" else 0) + before
    return Command(
        name=f"rollout-{index}",
        argv=(
            *(sys.executable, "-m", "laminar.workers.rollout.main"),
            *("--connect", str(run_dir), "--index", str(index)),
        ),
        environment={**common, "OMP_NUM_THREADS": str(config.rollout.threads), **_gpus(first, degree)},
        workers=(f"rollout-{index}",),
    )


def environment_command(run_dir: Path, common: dict[str, str], index: int) -> Command:
    """Command of one environment worker."""
    return Command(
        name=f"environment-{index}",
        argv=(
            *(sys.executable, "-m", "laminar.workers.environment.main"),
            *("--connect", str(run_dir), "--index", str(index)),
        ),
        environment={**common, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"},
        workers=(f"environment-{index}",),
    )


def _gpus(first: int, count: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for one process, cut out of what the controller may see; nothing without NVIDIA GPUs."""
    if not shutil.which("nvidia-smi"):
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(number) for number in range(first + count)]
    chosen = devices[first : first + count]
    # Fewer GPUs than processes: they share the last one (a small model on one GPU).
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen or devices[-1:])}

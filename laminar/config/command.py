"""`laminar config show FILE`, and the one line that sums an experiment up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from laminar.config import machine
from laminar.config.checks import check_config
from laminar.config.load import load_config, to_yaml
from laminar.config.schema import ExperimentConfig


def show(path: str | Path, overrides: Sequence[str] = ()) -> int:
    """Print the resolved config, defaults included, as YAML that loads back to the same config; return 0.

    Raises:
        UserError: the file or an override is wrong.
    """
    config = load_config(path, overrides)
    check_config(config)
    sys.stdout.write(to_yaml(config))
    return 0


def summary(config: ExperimentConfig) -> str:
    """The experiment in one line."""
    trainer, rollout = config.trainer, config.rollout
    engine = machine.engine_taken(rollout)
    taken = f"{engine} (auto)" if rollout.engine == "auto" else engine
    trajectories = trainer.groups_per_step * trainer.group_size
    return (
        f"{config.name}: model {config.model.path} in {config.model.dtype}, engine {taken} x {rollout.replicas} replicas, "
        f"{trainer.steps} steps of {trajectories} trajectories ({trainer.groups_per_step} groups x {trainer.group_size})"
    )

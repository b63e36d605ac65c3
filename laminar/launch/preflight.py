"""Every check that is made before anything starts; `laminar config check` makes the same and stops there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laminar.config.checks import check_config, check_machine
from laminar.config.load import load_config
from laminar.config.schema import ExperimentConfig
from laminar.controller.schedules.make_schedule import make_schedule
from laminar.environments.registry import check_environment
from laminar.launch.check_data import check_held_out, check_source


def preflight(path: Path, overrides: Sequence[str]) -> ExperimentConfig:
    """The experiment of a YAML file with overrides, if it can be run on this machine.

    Raises:
        UserError: the file, the config, the machine or the data is at fault.
    """
    config = load_config(path, overrides)
    check(config)
    return config


def check(config: ExperimentConfig) -> None:
    """Every check of an experiment and this machine.

    Raises:
        UserError: as `preflight`.
    """
    check_config(config)
    make_schedule(config)  # loads a buffer strategy of the user's own, too
    check_machine(config)
    check_source(config)
    check_held_out(config)
    check_environment(config.environment)

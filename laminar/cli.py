"""The `laminar` command. Imports what a subcommand needs only when it runs: `--help` is quick, and never loads torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import laminar
from laminar.errors import RunFailed, UserError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="laminar", description="Asynchronous RL post-training of language models: one controller, no global sync."
    )
    top.add_argument("--version", action="version", version=f"laminar {laminar.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run an experiment", description="Run an experiment on this machine.")
    _config_arguments(train)
    train.add_argument("--run-dir", type=Path, help="run directory (default: runs/<name of the experiment>)")
    train.add_argument("--overwrite", action="store_true", help="replace a run directory that exists")
    train.set_defaults(function=_train)

    attach = commands.add_parser(
        "attach", help="talk to a live run", description="Open a prompt on a live run; `help` lists its commands."
    )
    attach.add_argument("run_dir", type=Path, help="run directory")
    attach.add_argument("-c", dest="line", metavar="COMMAND", help="run one command and leave")
    attach.set_defaults(function=_attach)

    config = commands.add_parser("config", help="check or show an experiment config")
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="check a config and this machine; start nothing")
    _config_arguments(check)
    check.set_defaults(function=_config_check)
    show = actions.add_parser("show", help="print the resolved config as YAML")
    _config_arguments(show)
    show.set_defaults(function=_config_show)
    return top


def _config_arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("config", type=Path, help="YAML file")
    to.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, for example trainer.steps=10; may be repeated",
    )


def _train(options: argparse.Namespace) -> int:
    from laminar.launch.train import train

    return train(options.config, options.overrides, run_dir=options.run_dir, overwrite=options.overwrite)


def _attach(options: argparse.Namespace) -> int:
    from laminar.attach import attach

    return attach(options.run_dir, options.line)


def _config_check(options: argparse.Namespace) -> int:
    from laminar.config.command import summary
    from laminar.launch.preflight import preflight

    print(f"{options.config}: OK, {summary(preflight(options.config, options.overrides))}")
    return 0


def _config_show(options: argparse.Namespace) -> int:
    from laminar.config.command import show

    return show(options.config, options.overrides)


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand. Exit status: 0 done, 1 the run failed, 2 the user's input is at fault, 130 interrupted."""
    options = parser().parse_args(argv)
    try:
        return int(options.function(options))
    except UserError as error:
        print(f"laminar: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"laminar: the run failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())

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
    train.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="YAML file")
    _override_argument(train, "trainer.steps=10")
    train.add_argument(
        "--resume", type=Path, metavar="RUN_DIR", help="go on with a run that has stopped, in place of CONFIG"
    )
    train.add_argument("--run-dir", type=Path, help="run directory (default: runs/<name of the experiment>)")
    train.add_argument("--overwrite", action="store_true", help="replace a run directory that exists")
    train.set_defaults(function=_train)

    evaluate = commands.add_parser(
        "eval",
        help="evaluate a checkpoint on held-out prompts",
        description="Evaluate a checkpoint on the prompts of the config's section `evaluation`: rollouts and environment "
        "workers only, no trainer and no relays.",
    )
    _config_arguments(evaluate)
    evaluate.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoint of a run, or a Hugging Face model folder",
    )
    evaluate.add_argument("--json", metavar="FILE", help="write the figures as JSON, too; - is standard output")
    evaluate.add_argument(
        "--run-dir", type=Path, help="logs and responses (default: runs/<name of the experiment>-eval-<checkpoint>)"
    )
    evaluate.add_argument("--overwrite", action="store_true", help="replace a run directory that exists")
    evaluate.set_defaults(function=_evaluate)

    attach = commands.add_parser(
        "attach", help="talk to a live run", description="Open a prompt on a live run; `help` lists its commands."
    )
    attach.add_argument("run_dir", type=Path, help="run directory")
    attach.add_argument("-c", dest="line", metavar="COMMAND", help="run one command and leave")
    attach.set_defaults(function=_attach)

    _simulate_arguments(
        commands.add_parser(
            "simulate",
            help="run schedules on a modelled cluster, in virtual time",
            description=SIMULATE,
            epilog=SIMULATE_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )

    config = commands.add_parser("config", help="check or show an experiment config")
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="check a config and this machine; start nothing")
    _config_arguments(check)
    check.set_defaults(function=_config_check)
    show = actions.add_parser("show", help="print the resolved config as YAML")
    _config_arguments(show)
    show.set_defaults(function=_config_show)
    return top


SIMULATE = """\
What would this schedule do on 256 GPUs with my lengths? Runs the real controller on a virtual clock against modelled
GPUs, trainer, network and data, for every schedule, model and cluster size that CONFIG lists. No GPU is needed. Prints
a table and writes an HTML page; says of every figure that it is modelled, and lists the assumptions.

With --faults it injects random faults instead, and checks every invariant after each event."""

SIMULATE_EXAMPLES = """\
examples:
  laminar simulate configs/simulation/quick.yaml
  laminar simulate configs/simulation/my_lengths.yaml --set workload.lengths.file=lengths.txt --set sizes=[128,256]
  laminar simulate configs/simulation/paper_math.yaml --set models=[Qwen2.5-32B] --json -
  laminar simulate --faults --seeds 10000
  laminar simulate --faults --seed 4711

docs/simulation.md has the keys of CONFIG and what the page shows."""


def _config_arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("config", type=Path, help="YAML file")
    _override_argument(to, "trainer.steps=10")


def _override_argument(to: argparse.ArgumentParser, example: str) -> None:
    to.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"override a key, for example {example}; may be repeated",
    )


def _simulate_arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="YAML file of a study (configs/simulation/)")
    _override_argument(to, "sizes=[64,256]")
    to.add_argument("--json", metavar="FILE", help="write the result as JSON, too; - is standard output")
    to.add_argument(
        "--html", type=Path, metavar="FILE", help="the page (default: runs/simulations/<name of the study>.html)"
    )
    to.add_argument("--processes", type=int, metavar="N", help="runs at the same time (default: one per core)")
    faults = to.add_argument_group("random faults, in place of CONFIG")
    faults.add_argument("--faults", action="store_true", help="run random fault schedules and check the invariants")
    faults.add_argument("--seeds", type=int, metavar="N", help="how many (default: 1000)")
    faults.add_argument("--first-seed", type=int, metavar="K", help="seed of the first (default: 0)")
    faults.add_argument("--seed", type=int, metavar="N", help="replay this one and print its event log")
    to.set_defaults(function=_simulate)


def _train(options: argparse.Namespace) -> int:
    from laminar.launch.train import resume, train

    if options.resume is not None:
        wrong = {"CONFIG": options.config, "--run-dir": options.run_dir, "--overwrite": options.overwrite}
        if given := [name for name, value in wrong.items() if value]:
            raise UserError(
                f"train --resume takes no {' and no '.join(given)}: the run's own config goes on; change keys by --set"
            )
        return resume(options.resume, options.overrides)
    if options.config is None:
        raise UserError("train: give a CONFIG, for example configs/quickstart.yaml, or --resume RUN_DIR")
    return train(options.config, options.overrides, run_dir=options.run_dir, overwrite=options.overwrite)


def _evaluate(options: argparse.Namespace) -> int:
    from laminar.launch.evaluate import evaluate

    return evaluate(
        options.config,
        options.overrides,
        checkpoint=options.checkpoint,
        json_file=options.json,
        run_dir=options.run_dir,
        overwrite=options.overwrite,
    )


def _attach(options: argparse.Namespace) -> int:
    from laminar.attach import attach

    return attach(options.run_dir, options.line)


def _simulate(options: argparse.Namespace) -> int:
    only_study = {"CONFIG": options.config, "--set": options.overrides, "--json": options.json, "--html": options.html}
    only_faults = {"--seeds": options.seeds, "--first-seed": options.first_seed, "--seed": options.seed}
    wrong = [name for name, value in (only_study if options.faults else only_faults).items() if value not in (None, [])]
    if wrong and options.faults:
        raise UserError(f"simulate --faults takes no {' and no '.join(wrong)}: faults have scenarios of their own")
    if wrong:
        raise UserError(f"simulate: {' and '.join(wrong)} belong to --faults; add it, or leave them out")
    if options.faults and options.seed is not None and (options.seeds, options.first_seed) != (None, None):
        raise UserError("simulate --faults: --seed replays one; leave out --seeds and --first-seed")
    if options.faults:
        from laminar.simulation.faults.command import simulate_faults

        return simulate_faults(
            seeds=1000 if options.seeds is None else options.seeds,
            first_seed=options.first_seed or 0,
            seed=options.seed,
            processes=options.processes,
        )
    if options.config is None:
        raise UserError("simulate: give the CONFIG of a study, for example configs/simulation/quick.yaml, or --faults")
    from laminar.simulation.command import simulate

    return simulate(
        options.config,
        options.overrides,
        json_file=options.json,
        html_file=options.html,
        processes=options.processes,
    )


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

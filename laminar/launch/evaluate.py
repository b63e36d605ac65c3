"""`laminar eval CONFIG --checkpoint DIR`: rollouts serve the checkpoint's weights, environment workers score; no trainer.

Invariant: what cannot be run or written is refused before anything starts. With `--json -` the document alone is on
standard output, everything for a person on standard error.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import uvloop
from rich.console import Console

from laminar.config.load import load_config
from laminar.config.schema import ExperimentConfig
from laminar.errors import RunFailed, UserError
from laminar.evaluation_result import EvaluationResult
from laminar.launch import controller_process
from laminar.launch.commands import expected_workers
from laminar.launch.preflight import check
from laminar.launch.run import Interrupted, LocalRun
from laminar.observability.evaluation_terminal import EvaluationTerminal
from laminar.observability.events import EventBus
from laminar.observability.output_file import prepare, write
from laminar.observability.run_directory import RunDirectory
from laminar.observability.run_summary import exported_model

CHECKPOINT_MARKER = "complete.json"  # as the trainer writes it
KEY = "--checkpoint"


def evaluate(
    config_path: Path,
    overrides: Sequence[str],
    *,
    checkpoint: Path,
    json_file: str | None,
    run_dir: Path | None,
    overwrite: bool,
) -> int:
    """Exit status: 0, or 130 after Ctrl-C.

    Args:
        json_file: where the figures go as JSON as well; "-" is standard output.

    Raises:
        UserError: something is wrong that can be told before anything starts, or a worker found it.
        RunFailed: the evaluation could not be made.
    """
    model, step = find_model(checkpoint)
    config = evaluation_config(load_config(config_path, overrides), model)
    check(config)
    if json_file not in (None, "-"):
        prepare("--json", Path(json_file or ""))
    controller_process.prepare(len(expected_workers(config, evaluate_only=True)))
    path = run_dir or Path("runs") / f"{config.name}-eval-{checkpoint.resolve().name}"
    directory = RunDirectory.create(path, config, overwrite=overwrite)
    try:
        return _run(config, directory, step=step, checkpoint=checkpoint, json_file=json_file)
    finally:
        directory.close()


def find_model(checkpoint: Path) -> tuple[Path, int]:
    """The Hugging Face folder of a checkpoint and the step that wrote it (0 for a folder that is no checkpoint).

    Raises:
        UserError: there is none, or the checkpoint is not complete.
    """
    if not checkpoint.is_dir():
        raise UserError(
            f"{KEY}: {checkpoint}: no such folder; expected a checkpoint of a run, or a Hugging Face model folder"
        )
    model, marker = exported_model(checkpoint), checkpoint / CHECKPOINT_MARKER
    if model == checkpoint:
        return model, 0
    if model is None or not marker.is_file():
        inside = sorted(found.parent for found in checkpoint.glob(f"**/{CHECKPOINT_MARKER}"))
        hint = f"; did you mean {inside[-1]}?" if inside else ""
        raise UserError(f"{KEY}: {checkpoint}: neither a complete checkpoint nor a Hugging Face model folder{hint}")
    try:
        return model, int(json.loads(marker.read_text(encoding="utf-8"))["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{KEY}: {marker} is damaged: {error}") from error


def evaluation_config(config: ExperimentConfig, model: Path) -> ExperimentConfig:
    """The experiment with these weights, and with neither trainer nor relays on this machine.

    Raises:
        UserError: it has no held-out prompts.
    """
    if config.evaluation is None:
        raise UserError(
            "evaluation: the config has no such section, so there are no held-out prompts; add it, with at least "
            "evaluation.source (docs/evaluation.md)"
        )
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(model)}),
            "launch": config.launch.model_copy(update={"trainer": "manual", "relays": "manual"}),
        }
    )


def _run(
    config: ExperimentConfig, directory: RunDirectory, *, step: int, checkpoint: Path, json_file: str | None
) -> int:
    console = Console(stderr=json_file == "-", highlight=False)
    events = EventBus()
    started = time.monotonic()

    def elapsed() -> float:
        return time.monotonic() - started

    directory.record(events, elapsed)
    terminal = EvaluationTerminal(events, console, now=elapsed)
    terminal.say(f"evaluating {checkpoint} (run directory {directory.path})", "bold")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(LocalRun(config, directory.path, events, terminal, evaluate_only=step).run())
    except Interrupted:
        terminal.say("stopped", "bold")
        return 130
    if terminal.result is None:
        raise RunFailed(f"the evaluation did not come to its end; see {directory.path}/logs")
    terminal.table(f"{config.name}: {checkpoint}, step {step}", directory.path / "evaluations.jsonl")
    if json_file is not None:
        _write_json(terminal.result, checkpoint, json_file)
    return 0


def _write_json(result: EvaluationResult, checkpoint: Path, json_file: str) -> None:
    figures = asdict(result)
    del figures["policy_version"]  # 0 whatever the checkpoint: there is no trainer
    text = json.dumps({"checkpoint": str(checkpoint), **figures}, indent=1) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        return
    write(Path(json_file), text)

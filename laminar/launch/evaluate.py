"""`laminar eval CONFIG --checkpoint DIR`: rollouts serve the checkpoint's weights, environment workers score; no trainer.

Invariant: what cannot be run or written is refused before anything starts. With `--json -` the document alone is on
standard output, everything for a person on standard error.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from rich.console import Console

from laminar.config.load import load_config
from laminar.config.schema import ExperimentConfig
from laminar.errors import RunFailed, UserError
from laminar.evaluation_result import EvaluationResult
from laminar.launch import controller_process
from laminar.launch.commands import expected_workers
from laminar.launch.own_processes import OwnProcesses
from laminar.launch.preflight import check
from laminar.launch.run import Interrupted, LocalRun
from laminar.observability.evaluation_terminal import EvaluationTerminal
from laminar.observability.events import EventBus
from laminar.observability.output_file import prepare, write
from laminar.observability.run_directory import RunDirectory
from laminar.observability.run_summary import exported_adapter, exported_model
from laminar.weights import run_memory
from laminar.weights.checkpoint_marker import MARKER

KEY = "--checkpoint"
USERS_FAULT = 2  # exit status

Value = TypeVar("Value")


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
    found = find_model(checkpoint)
    config = evaluation_config(load_config(config_path, overrides), found.base)
    check(config)
    if json_file not in (None, "-"):
        prepare("--json", Path(json_file or ""))
    controller_process.prepare(len(expected_workers(config, evaluate_only=True)))
    path = run_dir or Path("runs") / f"{config.name}-eval-{checkpoint.resolve().name}"
    directory = RunDirectory.create(path, config, overwrite=overwrite)
    try:
        return _run(config, directory, found, checkpoint=checkpoint, json_file=json_file)
    finally:
        directory.close()


@dataclass(kw_only=True, slots=True, frozen=True)
class FoundModel:
    """What a checkpoint holds."""

    base: Path  # Hugging Face folder: the model itself, or what the adapters belong to
    adapter: Path | None = None  # folder of adapters; None: there are none
    step: int = 0  # that wrote it; 0 for a folder that is no checkpoint


def find_model(checkpoint: Path) -> FoundModel:
    """The model of a checkpoint of a run, or of a folder that Hugging Face's tools or peft have written.

    Raises:
        UserError: there is none, or the checkpoint is not complete.
    """
    if not checkpoint.is_dir():
        raise UserError(
            f"{KEY}: {checkpoint}: no such folder; expected a checkpoint of a run, or a Hugging Face model folder"
        )
    model, adapter, marker = exported_model(checkpoint), exported_adapter(checkpoint), checkpoint / MARKER
    found = adapter or model
    if found is None or (found != checkpoint and not marker.is_file()):
        inside = sorted(complete.parent for complete in checkpoint.glob(f"**/{MARKER}"))
        hint = f"; did you mean {inside[-1]}?" if inside else ""
        raise UserError(f"{KEY}: {checkpoint}: neither a complete checkpoint nor a Hugging Face model folder{hint}")
    step = 0 if found == checkpoint else _read(marker, "step", int)
    if adapter is None:
        assert model is not None
        return FoundModel(base=model, step=step)
    base = _read(adapter / "adapter_config.json", "base_model_name_or_path", Path)
    return FoundModel(base=base, adapter=adapter, step=step)


def _read(file: Path, key: str, kind: Callable[[Any], Value]) -> Value:
    try:
        return kind(json.loads(file.read_text(encoding="utf-8"))[key])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{KEY}: {file} is damaged: {error!r}") from error


def _merged(adapter: Path, folder: Path, config: ExperimentConfig) -> Path:
    """Base model and adapters as one model; by a process of its own, for it needs torch.

    Raises:
        UserError: the two do not fit each other.
        RunFailed: it could not be written.
    """
    command = [sys.executable, "-m", "laminar.workers.trainer.merge_adapter", str(adapter), str(folder)]
    merging = subprocess.run([*command, "--dtype", config.model.dtype], capture_output=True, text=True, check=False)
    if merging.returncode == USERS_FAULT:
        raise UserError(f"{KEY}: {merging.stderr.strip()}")
    if merging.returncode:
        raise RunFailed(f"{adapter} could not be merged into its base model: {merging.stderr[-2000:]}")
    return folder


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
    config: ExperimentConfig, directory: RunDirectory, found: FoundModel, *, checkpoint: Path, json_file: str | None
) -> int:
    console = Console(stderr=json_file == "-", highlight=False)
    events = EventBus()
    started = time.monotonic()

    def elapsed() -> float:
        return time.monotonic() - started

    directory.record(events, elapsed)
    terminal = EvaluationTerminal(events, console, now=elapsed)
    terminal.say(f"evaluating {checkpoint} (run directory {directory.path})", "bold")
    if found.adapter is not None:
        terminal.say(f"merging its adapters into {found.base}")
        config = evaluation_config(config, _merged(found.adapter, directory.path / "merged-model", config))

    async def run() -> None:
        processes = OwnProcesses(directory.path, run_id)
        own = LocalRun(
            config, directory.path, events, terminal, processes, None, run_id=run_id, evaluate_only=found.step
        )
        await own.run()

    run_id = f"{config.name[:60]}-{secrets.token_hex(4)}"
    run_memory.remove_leftovers()
    run_memory.claim(run_id)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except Interrupted:
        terminal.say("stopped", "bold")
        return 130
    finally:
        run_memory.remove(run_id)
    if terminal.result is None:
        raise RunFailed(f"the evaluation did not come to its end; see {directory.path}/logs")
    terminal.table(f"{config.name}: {checkpoint}, step {found.step}", directory.path / "evaluations.jsonl")
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

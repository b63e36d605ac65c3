"""`laminar train --resume RUN_DIR`: every check that is made before a run is taken up.

Invariant: a run is resumed with the model, the data and the journal that it had, from a checkpoint of its own, or not at all.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from laminar.config.changes import READ_BY, check_changes
from laminar.config.data_schema import FileSource
from laminar.config.load import to_yaml
from laminar.config.schema import ExperimentConfig
from laminar.controller.journal.restore import read_meta
from laminar.controller.journal.tables import JOURNAL, open_journal
from laminar.errors import UserError
from laminar.launch.checkpoint_choice import choose_checkpoint
from laminar.launch.preflight import preflight
from laminar.launch.records import note
from laminar.observability.run_directory import CONFIG
from laminar.protocol.connection import CONNECTION_FILE

READ_BYTES = 1 << 20
PIECES, PIECE_BYTES = 64, 1 << 14  # of a file of weights


def fingerprints(config: ExperimentConfig) -> dict[str, str]:
    """What tells this model and this data from others of the same name."""
    return {"model": model_fingerprint(Path(config.model.path)), "data": _data(config)}


def take_up(run_dir: Path, overrides: Sequence[str]) -> tuple[ExperimentConfig, str]:
    """Check a run that is to be resumed, and write down what changes. Returns the config and the run's id.

    Raises:
        UserError: what is wrong, and what to do about it.
    """
    path = run_dir / JOURNAL
    connection = open_journal(path)
    try:
        meta = read_meta(connection)
        before = ExperimentConfig.model_validate_json(meta["config"])
        config = preflight(run_dir / CONFIG, overrides)
        changed = check_changes(before, config)
        if (run_dir / CONNECTION_FILE).exists():  # of a run that did not end by itself
            _check_workers_by_hand(config, [key for key, _, _ in changed], run_dir)
        _check_fingerprints(config, meta)
        said = choose_checkpoint(connection, meta, run_dir)
        note(connection, config=config.model_dump_json(), asked="[]")
    except (KeyError, ValueError, sqlite3.Error) as error:
        raise UserError(
            f"{path}: damaged ({type(error).__name__}: {error}). Put back a copy of the run directory from before the damage, "
            "or start a new run from a checkpoint's huggingface folder (model.path)"
        ) from error
    finally:
        connection.close()
    (run_dir / CONFIG).write_text(to_yaml(config), encoding="utf-8")
    for key, old, new in changed:
        print(f"{key}: {old} -> {new}")
    print(f"resuming {run_dir} {said}")
    return config, meta["run_id"]


def _check_workers_by_hand(config: ExperimentConfig, changed: Sequence[str], run_dir: Path) -> None:
    """Those that wait for another controller would go on with the values that they were started with."""
    for part, sections in READ_BY.items():
        keys = [key for key in changed if key.partition(".")[0] in sections]
        if keys and getattr(config.launch, part) == "manual":
            raise UserError(
                f"{', '.join(keys)}: launch.{part} is manual, and workers that wait for the run to go on would keep the old values. "
                f"Resume without the change; or end them, remove {run_dir / CONNECTION_FILE}, and start them again"
            )


def _check_fingerprints(config: ExperimentConfig, meta: dict[str, str]) -> None:
    now = fingerprints(config)
    if now["model"] != meta["model"]:
        raise UserError(
            f"model.path: the files in {config.model.path} are not those that the run began with, and its checkpoints are of "
            "that model. Put them back, or start a new run"
        )
    if now["data"] != meta["data"]:
        files = ", ".join(
            dict.fromkeys(str(path.parent if path.suffix == ".parquet" else path) for path in _data_files(config))
        )
        raise UserError(
            f"data.source: {files} has changed since the run began, and prompts are told by their position in it. "
            "Put it back as it was, or start a new run"
        )


def model_fingerprint(folder: Path) -> str:
    """Of the small files their contents, of the weights pieces from everywhere: training changes nearly all of a model's weights,
    and reading them whole takes minutes.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            nbytes = path.stat().st_size
            digest.update(f"{path.name} {nbytes}\n".encode())
            whole = path.suffix == ".json" or nbytes <= PIECES * PIECE_BYTES
            starts = range(0, nbytes, PIECE_BYTES if whole else nbytes // PIECES)
            with open(path, "rb") as file:
                for start in starts:
                    file.seek(start)
                    digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def _data(config: ExperimentConfig) -> str:
    """Of all files that prompts are read from their contents; what is generated follows from the config alone."""
    digest = hashlib.sha256()
    for path in _data_files(config):
        digest.update(f"{path.name}\n".encode())
        with open(path, "rb") as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def _data_files(config: ExperimentConfig) -> Iterator[Path]:
    for _, source in config.data.single_sources():
        if isinstance(source, FileSource):
            path = Path(source.path)
            yield from sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else (path,)

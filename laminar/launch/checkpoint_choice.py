"""From which checkpoint a run goes on: the newest that is sound.

Invariant: a checkpoint is chosen only if it is of the run, all its files are those that were written, and the journal still has
what was trained since.
"""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

from laminar.errors import DamagedCheckpoint, UserError
from laminar.observability.plain_text import data_size, duration
from laminar.weights.checkpoint_marker import MARKER, find_damage, read_marker

DAMAGED = "damaged.json"  # the marker of a checkpoint that was found damaged
TOLD_EVERY_S = 5.0  # while a checkpoint is read

# Groups that steps after this one have trained, and of which the journal has nothing left: it goes back no further than the
# oldest of the checkpoints that are kept.
_FORGOTTEN = (
    "SELECT count(*) FROM groups LEFT JOIN prompts USING (group_id) "
    "WHERE fate = 'trained' AND step > ? AND prompts.group_id IS NULL"
)


def choose_checkpoint(connection: sqlite3.Connection, meta: dict[str, str], run_dir: Path) -> str:
    """Leave the newest sound one as the journal's newest, and say which, in the words that follow "resuming RUN_DIR".

    Each damaged one is named in a warning; its marker gets the name DAMAGED, so that nothing takes the folder for a checkpoint.

    Raises:
        UserError: none is sound, or one is of another run.
    """
    folder = run_dir / "checkpoints"
    rows = connection.execute("SELECT step, path, policy_version FROM checkpoints ORDER BY step DESC").fetchall()
    gone: list[int] = []
    damaged: dict[int, str] = {}
    for step, name, version in rows:
        if connection.execute(_FORGOTTEN, (step,)).fetchone()[0]:
            break
        checkpoint = folder / Path(name).name  # where they are, too, when the run directory was moved
        if not checkpoint.is_dir():
            gone.append(step)
            continue
        try:
            checked = _check(checkpoint, meta["run_id"], step, version)
        except DamagedCheckpoint as error:
            damaged[step] = str(error)
            continue
        connection.execute("UPDATE checkpoints SET path = ? WHERE step = ?", (str(checkpoint), step))
        connection.execute("DELETE FROM checkpoints WHERE step > ?", (step,))
        for other, path, _ in rows:
            if other in damaged and (marker := folder / Path(path).name / MARKER).exists():
                marker.rename(marker.with_name(DAMAGED))
        skipped = f" (those of steps {gone} are gone)" if gone else ""
        if damaged:
            again = int(meta.get("step", "0")) - step
            for why in damaged.values():
                print(f"warning: {why}")
            print(f"warning: going on from the checkpoint of step {step} instead: {again} steps are trained again")
        return f"from the checkpoint of step {step}{skipped}{checked}"
    if rows:
        raise UserError(_no_way_back(folder, gone, damaged))
    return "from the beginning: it has no checkpoint yet"


def _no_way_back(folder: Path, gone: list[int], damaged: dict[int, str]) -> str:
    reasons = list(damaged.values())
    if gone:
        reasons.append(f"{folder}: the checkpoints of steps {gone} are gone")
    return (
        f"{'; '.join(reasons)}. What was trained since an older checkpoint cannot be told from what is left. Put one of them back "
        "as it was, or start a new run (model.path: a checkpoint's huggingface folder)"
    )


def _check(checkpoint: Path, run_id: str, step: int, version: int) -> str:
    """What is to be said of a sound one.

    Raises:
        DamagedCheckpoint: a file is not what was written.
        UserError: it is of another run.
    """
    marker = read_marker(checkpoint)
    try:
        found = (json.loads(marker.state)["run_id"], marker.step, marker.policy_version)
    except (KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{checkpoint / MARKER} is damaged: it names no run") from error
    if found != (run_id, step, version):
        raise UserError(
            f"{checkpoint}: a checkpoint of run {found[0]}, step {found[1]}, version {found[2]}; the journal knows one of run "
            f"{run_id}, step {step}, version {version}. Put it back as it was, or delete the folder to resume from an older "
            "checkpoint"
        )
    if marker.files is None:
        return "; it is of an older laminar and has no checksums: whether its files are damaged is not known"
    started = time.monotonic()
    if damage := find_damage(checkpoint, marker.files, _Progress(checkpoint, marker.nbytes).read):
        raise DamagedCheckpoint(f"{checkpoint / damage}")
    return f" ({data_size(marker.nbytes)}, checked in {duration(time.monotonic() - started)})"


class _Progress:
    """Says how far the check of a large checkpoint is."""

    def __init__(self, checkpoint: Path, nbytes: int) -> None:
        self._checkpoint, self._nbytes = checkpoint, nbytes
        self._read = 0
        self._told = time.monotonic()

    def read(self, nbytes: int) -> None:
        """So many bytes more; figures for a person, so threads may get into each other's way."""
        self._read += nbytes
        if time.monotonic() - self._told >= TOLD_EVERY_S:
            self._told = time.monotonic()
            print(f"checking {self._checkpoint}: {data_size(self._read)} of {data_size(self._nbytes)}", flush=True)

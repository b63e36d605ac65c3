"""The shared memory that weight versions need, against what a host has.

Invariant: room that is said to suffice holds all versions that a relay keeps, and one more that arrives or is made ready
for the next publish. Headers of the files (some KiB a version) are not counted.
"""

from __future__ import annotations

from pathlib import Path

from laminar.config import machine
from laminar.config.model_folder import read_model_folder
from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError

MIB = 1 << 20


def version_bytes(config: ExperimentConfig) -> int:
    """Bytes of one published version, laid out in full; 0 if the model's folder does not tell."""
    try:
        shape = read_model_folder(Path(config.model.path), "model.path")
    except UserError:
        return 0
    return shape.weight_bytes(config.model.dtype) or 0


def kept_versions(version_bytes: int, keep_versions: int, keep_mib: int | None) -> int:
    """How many versions of this size a relay keeps: `keep_versions`, or fewer that fit into `keep_mib`, at least one."""
    if keep_mib is None or version_bytes == 0:
        return keep_versions
    return max(1, min(keep_versions, keep_mib * MIB // version_bytes))


def check_store_room(directory: Path, version_bytes: int, keep_versions: int, keep_mib: int | None) -> None:
    """Check on a relay's own host, before it takes part, that its store has room. Versions that it holds already count.

    Args:
        directory: folder of the store, in shared memory.
        version_bytes: size of one version; 0 (not known) passes.
        keep_versions: `relay.keep_versions`.
        keep_mib: `relay.keep_mib`.

    Raises:
        UserError: `keep_mib` holds no version, or the shared memory is too small.
    """
    if version_bytes == 0:
        return
    problem = bound_problem(version_bytes, keep_mib)
    if problem is None:
        present = machine.free_shared_memory(directory) + _stored_bytes(directory)
        problem = room_problem(version_bytes, keep_versions, keep_mib, relays=1, present=present, directory=directory)
    if problem is not None:
        raise UserError(problem)


def bound_problem(version_bytes: int, keep_mib: int | None) -> str | None:
    """What is wrong with `relay.keep_mib`, None if nothing."""
    if keep_mib is None or keep_mib * MIB >= version_bytes:
        return None
    return (
        f"relay.keep_mib: {keep_mib}; expected at least {-(-version_bytes // MIB)}, because one version of the weights has "
        f"{version_bytes} bytes; raise it, or remove it to keep relay.keep_versions versions whatever their size"
    )


def room_problem(
    version_bytes: int,
    keep_versions: int,
    keep_mib: int | None,
    *,
    relays: int,
    present: int,
    directory: Path,
) -> str | None:
    """What is wrong with `present` bytes of shared memory for so many relays on one host, None if nothing."""
    kept = kept_versions(version_bytes, keep_versions, keep_mib)
    needed = relays * (kept + 1) * version_bytes
    if present >= needed:
        return None
    bound = "" if kept == keep_versions else f" (bounded by relay.keep_mib: {keep_mib})"
    fewer = ("lower relay.keep_versions, or bound them by relay.keep_mib",) if kept > 1 else ()
    count = ("lower relay.count",) if relays > 1 else ()
    enlarge = (
        f"enlarge it (mount -o remount,size=... {machine.SHARED_MEMORY}; for a container --shm-size or --ipc=host)"
    )
    ways = "; ".join((*fewer, *count, enlarge))
    each = "" if relays == 1 else f" in each of {relays} relays on this host"
    return (
        f"relay.keep_versions: {keep_versions}{bound}: {kept} and one that arrives, of {version_bytes} bytes each{each}, "
        f"need {needed} bytes of shared memory; {directory} has {present}; {ways}"
    )


def _stored_bytes(directory: Path) -> int:
    """Bytes of the files that lie in a store already; one may go while we look."""
    total = 0
    for path in directory.iterdir():
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total

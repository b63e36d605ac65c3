"""Checkpoints: the trainer's state, a Hugging Face folder, and a marker that makes them one.

Invariants: a folder under its final name with a marker is complete and durable; it is written under a hidden name,
synced, marked and only then renamed. A checkpoint that fails leaves nothing behind, no older one is touched before the
new one is complete, and whatever goes wrong is an answer, never the end of the run. Nothing is loaded from files that are
not those that the marker tells of.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from laminar.errors import DamagedCheckpoint, UserError
from laminar.protocol.messages import CheckpointSaved, SaveCheckpoint
from laminar.weights.checkpoint_marker import (
    MARKER,
    CheckpointMarker,
    FileSum,
    find_damage,
    read_marker,
    sum_files,
    write_marker,
)
from laminar.workers.trainer.actor import Actor
from laminar.workers.trainer.adapter_files import check_adapter, gather_adapters, write_adapter
from laminar.workers.trainer.critic import named_state
from laminar.workers.trainer.model_loading import named_weights, save_model
from laminar.workers.trainer.parallel import full_tensor
from laminar.workers.trainer.ranks import Ranks

TRAINER_FOLDER = "trainer"
HUGGINGFACE_FOLDER = "huggingface"
ADAPTER_FOLDER = "adapter"  # in place of it where only adapters are trained
SPARE_BYTES = 16 * 1024**2  # tokenizer, configs, metadata

log = logging.getLogger("laminar.trainer")


def save_checkpoint(actor: Actor, message: SaveCheckpoint) -> CheckpointSaved:
    """Write a checkpoint, then remove the oldest beyond `trainer.keep_checkpoints`. A collective call; never raises for
    what the disk does.
    """
    started = time.perf_counter()
    ranks = actor.ranks
    final = Path(message.path)
    partial = final.with_name(f".{final.name}.partial")
    needed = needed_bytes(actor)
    present = -1
    files: dict[str, FileSum] = {}  # of this rank

    def prepare() -> None:
        nonlocal present
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        present = free_bytes(final.parent)
        if present < needed:
            raise OSError("not enough space on the disk")
        partial.mkdir()

    def finish() -> None:
        _sync_tree(partial)
        marker = CheckpointMarker(
            step=message.step, policy_version=message.policy_version, state=message.state, files=all_files
        )
        write_marker(partial, marker)
        _sync(partial)
        _rename(partial, final)

    def on_first(action: Callable[[], None]) -> Callable[[], None]:
        return action if ranks.rank == 0 else lambda: None

    error = ranks.first_error(_attempt("", on_first(prepare)))
    error = error or ranks.first_error(
        _attempt("the trainer's state: ", lambda: _write_trainer(actor, partial / TRAINER_FOLDER))
    )
    if not error:
        what, write = _gather_export(actor, partial)  # all ranks gather, rank 0 keeps
        error = ranks.first_error(_attempt(what, on_first(write)))
    error = error or ranks.first_error(_attempt("", lambda: files.update(_sum_own_files(ranks.rank, partial))))
    if not error:
        all_files = {name: file for part in ranks.gather(files) for name, file in part.items()}
        error = ranks.first_error(_attempt("", on_first(finish)))
    nbytes = 0
    if error:
        on_first(lambda: shutil.rmtree(partial, ignore_errors=True))()
        # Figures of rank 0's disk; the other ranks repeat its error without them.
        figures = f"; {needed} bytes needed, {present} bytes free" if present >= 0 else f"; {needed} bytes needed"
        error = f"checkpoint {final} was not written: {error}{figures}"
        log.error("%s", error)
    else:
        nbytes = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
        on_first(lambda: _prune(final, actor.config.trainer.keep_checkpoints))()
    return CheckpointSaved(
        step=message.step, path=message.path, seconds=time.perf_counter() - started, nbytes=nbytes, error=error
    )


def load_checkpoint(actor: Actor, path: Path | str) -> CheckpointMarker:
    """Put parameters and optimizer back as they were, and return the marker. A collective call.

    Raises:
        DamagedCheckpoint: it is not complete, or a file is not what was written; names the file.
        UserError: it is one of another model; names the folder.
    """
    folder = Path(path)
    marker = _read_checked(folder, actor.ranks)
    if actor.config.trainer.lora is not None:
        check_adapter(actor.model, folder / ADAPTER_FOLDER)
    state = _trainer_state(actor)
    try:
        load(state, checkpoint_id=folder / TRAINER_FOLDER, no_dist=not dist.is_initialized())
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"checkpoint {folder} does not fit the model, or is damaged: {_one_line(_first_failure(error))}. Put it back as it "
            "was, or delete the folder to go on from an older checkpoint"
        ) from error
    return marker


def _read_checked(folder: Path, ranks: Ranks) -> CheckpointMarker:
    """The marker of a checkpoint whose trainer's files are those that were written; each rank reads some. A collective call.

    Raises:
        DamagedCheckpoint: they are not; on all ranks.
    """
    try:
        marker = read_marker(folder)
        files = marker.files or {}
        names = sorted(name for name in files if name.startswith(f"{TRAINER_FOLDER}/"))
        damage = find_damage(folder, {name: files[name] for name in names[ranks.rank :: ranks.size]})
        error = f"{folder / damage}" if damage else ""
    except DamagedCheckpoint as failure:
        error = str(failure)
    if error := ranks.first_error(error):
        raise DamagedCheckpoint(error)
    return marker


def needed_bytes(actor: Actor) -> int:
    """What a checkpoint of this model takes on disk, a little more than it really does."""
    weights = _trained_weights(actor).values()
    master = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    moments = 2 * sum(parameter.numel() * parameter.element_size() for parameter in actor.parameters)
    if actor.critic is not None:
        master += sum(tensor.numel() * tensor.element_size() for tensor in named_state(actor.critic).values())
        moments += 2 * sum(parameter.numel() * parameter.element_size() for parameter in actor.critic.parameters)
    exported_dtype = actor.published_dtype if actor.config.trainer.lora is None else torch.float32
    exported = sum(
        tensor.numel() * (exported_dtype.itemsize if tensor.is_floating_point() else tensor.element_size())
        for tensor in weights
    )
    return master + moments + exported + SPARE_BYTES


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write there."""
    return int(shutil.disk_usage(folder).free)


def _trainer_state(actor: Actor) -> dict[str, Any]:
    """The model's, the critic's and the optimizers' own tensors by name: loading into them is loading into the actor."""
    weights = _trained_weights(actor)
    device = actor.ranks.device
    state: dict[str, Any] = {
        "model": {name: tensor.detach() for name, tensor in weights.items()},
        "optimizer": _optimizer_state(actor.optimizer, weights, device),
    }
    if actor.critic is not None:
        own = named_state(actor.critic)
        state["critic"] = {name: tensor.detach() for name, tensor in own.items()}
        state["critic_optimizer"] = _optimizer_state(actor.critic.optimizer, own, device)
    return state


def _trained_weights(actor: Actor) -> dict[str, torch.Tensor]:
    """The model's tensors; where only adapters are trained, these: what is frozen is in the base model's folder."""
    weights = named_weights(actor.model)
    if actor.config.trainer.lora is None:
        return weights
    return {name: parameter for name, parameter in weights.items() if parameter.requires_grad}


def _optimizer_state(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, dict[str, torch.Tensor]]:
    """By name of the parameter.

    AdamW makes its state at the first update; here it is made before, with what it would start from. The learning rate
    is no state: it is computed from the step, which the marker holds.
    """
    result: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in weights.items():
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        result[name] = {key: state[key] for key in ("step", "exp_avg", "exp_avg_sq")}
    return result


def _write_trainer(actor: Actor, folder: Path) -> None:
    """Model and optimizer, each rank its share; torch syncs the files."""
    save(_trainer_state(actor), checkpoint_id=folder, no_dist=not dist.is_initialized())


def _sum_own_files(rank: int, folder: Path) -> dict[str, FileSum]:
    """Of the files that this rank has written: its host has them in memory still. Rank 0 has written all but the others' shares."""
    files = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return sum_files(folder, [str(file) for file in files if _writer_of(file) == rank])


def _writer_of(file: Path) -> int:
    share = re.fullmatch(r"__(\d+)_\d+\.distcp", file.name) if file.parent.name == TRAINER_FOLDER else None
    return int(share[1]) if share else 0


def _gather_export(actor: Actor, partial: Path) -> tuple[str, Callable[[], None]]:
    """What other tools load, gathered on rank 0; its name in messages, and what writes it. Collective when sharded."""
    if actor.config.trainer.lora is not None:
        adapters = gather_adapters(actor.model, keep=actor.ranks.rank == 0)
        return "the adapters: ", lambda: write_adapter(actor.model, adapters, partial / ADAPTER_FOLDER)
    weights = _export_weights(actor)
    return "the Hugging Face folder: ", lambda: _write_huggingface(actor, weights, partial / HUGGINGFACE_FOLDER)


def _export_weights(actor: Actor) -> dict[str, torch.Tensor]:
    """On rank 0 all weights on the CPU as they are published; elsewhere nothing. Collective when sharded."""
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in named_weights(actor.model).items():
        whole = full_tensor(tensor)
        if actor.ranks.rank == 0:
            weights[name] = whole.to("cpu", actor.published_dtype if whole.is_floating_point() else whole.dtype)
    return weights


def _write_huggingface(actor: Actor, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """A folder that `AutoModelForCausalLM.from_pretrained` loads."""
    save_model(actor.model, actor.tokenizer, weights, actor.config.model.dtype, folder)


def _rename(partial: Path, final: Path) -> None:
    """Give the checkpoint its name. A folder that has it already (a step made again after a restart) goes."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _prune(newest: Path, keep: int) -> None:
    """Remove complete checkpoints beside the newest, the oldest steps first; `keep` stay."""
    older: list[tuple[int, Path]] = []
    for marker in newest.parent.glob(f"*/{MARKER}"):
        if marker.parent != newest and not marker.parent.name.startswith("."):
            try:
                older.append((read_marker(marker.parent).step, marker.parent))
            except UserError as error:
                log.warning("left alone: %s", error)
    for _, folder in sorted(older)[: max(0, len(older) - (keep - 1))]:
        log.info("removing the old checkpoint %s", folder)
        (folder / MARKER).unlink(missing_ok=True)  # first: what is half removed is not complete
        shutil.rmtree(folder, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for directory, _, files in os.walk(folder):
        for name in files:
            _sync(Path(directory) / name)
        _sync(Path(directory))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _attempt(what: str, action: Callable[[], None]) -> str:
    """Run it and return "", or what went wrong in one line that starts with `what`.

    A full disk shows up as many exceptions (OSError, torch's, safetensors'), and none of them may end the run.
    """
    try:
        action()
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        log.warning("writing a checkpoint failed", exc_info=True)
        return what + _why_not_written(error)
    return ""


def _why_not_written(error: BaseException) -> str:
    """One line: the disk's own error where it can be found. torch covers it with its own ("unexpected pos 704 vs 598"),
    and of another rank's error that is all there is.
    """
    link: BaseException | None = _first_failure(error)
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return _one_line(link) if link else f"writing failed, as on a full disk ({_one_line(_first_failure(error))})"


def _first_failure(error: BaseException) -> BaseException:
    """The first error in torch's collection of those of all ranks."""
    return (
        next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) and error.failures else error
    )


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

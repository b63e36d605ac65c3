"""Torch on top of the weight store: tensors into a version, and views of a version as tensors.

Invariant: a tensor is in the file once. Names that share their memory with an earlier name (a tied `lm_head`) have no
entry; whoever loads the file ties them again, as `from_pretrained` and vLLM do. A tensor that the layout cuts into shards
is written and read as the matrix that it is; no full copy of it is made on either way.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from laminar.weights.layout import DTYPE_BYTES, TensorEntry, WeightLayout
from laminar.weights.sharded_matrix import ShardedMatrix, columns_of_shards
from laminar.weights.version_file import VersionReader, VersionWriter

# copy(target, source): same shape; the target, a view of the file, may be of another floating-point dtype
Copy = Callable[[torch.Tensor, torch.Tensor], object]

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def layout_of(
    state_dict: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None, shards: Mapping[str, int] | None = None
) -> WeightLayout:
    """The layout for a state dict, in its order, tied names left out.

    Args:
        state_dict: Hugging Face names to tensors (any device, meta included).
        dtype: what floating-point tensors are stored as; None keeps each tensor's own.
        shards: into how many shards of columns the tensors named here are cut.

    Raises:
        ValueError: a dtype that the store does not know, or columns that cannot be cut so; names the tensor.
    """
    tied = tied_names(state_dict)
    return WeightLayout.plan(
        (
            (name, _stored_dtype(name, tensor, dtype), tuple(tensor.shape))
            for name, tensor in state_dict.items()
            if name not in tied
        ),
        shards,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """What a layout calls a dtype. Raises ValueError for one that the store does not know."""
    if dtype not in _NAMES:
        raise ValueError(f"dtype {dtype}; the weight store knows {', '.join(DTYPE_BYTES)}")
    return _NAMES[dtype]


def tied_names(state_dict: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names whose tensor is the very memory of an earlier name's -> that earlier name."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state_dict.items():
        key = _memory_key(tensor)
        if key is None:
            continue
        if key in first:
            tied[name] = first[key]
        else:
            first[key] = name
    return tied


def write_tensors(
    writer: VersionWriter, named_tensors: Iterable[tuple[str, torch.Tensor]], copy: Copy = torch.Tensor.copy_
) -> None:
    """Copy every tensor of the writer's layout into place, casting floating-point tensors to the layout's dtype.

    Takes an iterable, so that a caller can gather one tensor at a time. A name that is not in the layout is passed over
    only if its memory was already written under another name (tied). A `copy` that puts work off must have it done
    before the writer commits.

    Raises:
        ValueError: a tensor too many, too few, twice, or of another shape or kind; names it.
    """
    missing = {entry.name: entry for entry in writer.layout.entries}
    written: dict[tuple[object, ...], weakref.ref[torch.Tensor]] = {}  # a freed tensor's memory may come again
    buffer = torch.frombuffer(writer.buffer, dtype=torch.uint8) if writer.buffer.size else torch.empty(0)
    for name, tensor in named_tensors:
        key = _memory_key(tensor)
        entry = missing.pop(name, None)
        if entry is None:
            if key is None or key not in written or written[key]() is None:
                raise ValueError(f"tensor {name!r} was given twice or is not in the weight layout")
            continue
        _write(buffer, entry, tensor, copy)
        if key is not None:
            written[key] = weakref.ref(tensor)
        del tensor  # before the next one is gathered
    if missing:
        raise ValueError(f"weight layout has {len(missing)} tensors that were not given, first {next(iter(missing))!r}")


def _write(buffer: torch.Tensor, entry: TensorEntry, tensor: torch.Tensor, copy: Copy) -> None:
    if tuple(tensor.shape) != entry.shape:
        raise ValueError(f"tensor {entry.name!r} has shape {tuple(tensor.shape)}; the weight layout has {entry.shape}")
    target_dtype = TORCH_DTYPES[entry.dtype]
    if tensor.dtype != target_dtype and not (tensor.is_floating_point() and target_dtype.is_floating_point):
        raise ValueError(f"tensor {entry.name!r} has dtype {tensor.dtype}; the weight layout has {entry.dtype}")
    if entry.nbytes:
        source = tensor.detach()
        copy(_stored(buffer, entry), columns_of_shards(source, entry.shards) if entry.shards > 1 else source)


def read_tensors(path: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a committed version file; the tensors are views of the mapped file, nothing is copied.

    A matrix that lies in shards is a `ShardedMatrix`: its shards are views, slices of whole shards and `copy_` out of it
    take no copy of the full one, anything else does. A view stays valid after the file is unlinked. Writing into one changes only this process's view (copy-on-write).

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a weight file.
    """
    reader = VersionReader(path, copy_on_write=True)
    buffer = torch.from_numpy(reader.buffer)
    for entry in reader.layout.entries:
        stored = _stored(buffer, entry)
        yield entry.name, ShardedMatrix(stored) if entry.shards > 1 else stored


def _stored(buffer: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """The entry's place in the buffer (uint8 [total_bytes]) as a tensor: of its shape, or [shards, out, in / shards]."""
    shape = entry.shape
    if entry.shards > 1:
        shape = (entry.shards, shape[0], shape[1] // entry.shards)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[entry.dtype])
    piece = buffer[entry.offset : entry.offset + entry.nbytes]
    return piece.view(TORCH_DTYPES[entry.dtype]).view(shape)


def _stored_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> str:
    stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    try:
        return dtype_name(stored)
    except ValueError as error:
        raise ValueError(f"tensor {name!r}: {error}") from None


def _memory_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What two tensors share when they are the same memory; None where that cannot be told (empty, meta)."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    return (
        tensor.device,
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )

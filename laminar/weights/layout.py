"""Where each tensor of a weight version lies in one flat buffer.

Invariants: the entries of a `WeightLayout` have different names, lie inside the buffer, start on 64-byte boundaries and
do not overlap, whether the layout was planned here or came from a file or a peer; the bytes between them are zero. Each
shard of a tensor that rollouts split by columns is contiguous, as those of a tensor split by rows are anyway.

Imports no torch: the relay, which only moves bytes, uses it too. Dtypes are named as torch names them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

ALIGNMENT = 64  # bytes; a cache line, and what vectorised copies like

# Bytes of one element. bfloat16 and float8 have no numpy type, hence names and sizes only.
DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorEntry:
    """One tensor of a layout, in row-major order; with several shards, [out, in] lies as [shards, out, in / shards]."""

    name: str  # Hugging Face state-dict name
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the data region
    nbytes: int
    shards: int = 1  # into which the columns of a matrix are cut, one after another; 1: stored as it is


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightLayout:
    """All tensors of one weight version, in file order."""

    entries: tuple[TensorEntry, ...]
    total_bytes: int  # size of the data region, padding included

    def __post_init__(self) -> None:
        """Check the invariant. Raises ValueError naming the tensor that breaks it."""
        _check(self)

    @classmethod
    def plan(
        cls, named_specs: Iterable[tuple[str, str, Iterable[int]]], shards: Mapping[str, int] | None = None
    ) -> WeightLayout:
        """Lay out (name, dtype, shape) one after another.

        Args:
            named_specs: the tensors.
            shards: into how many shards the columns of the tensors named here are cut; not at all for those that are not.

        Raises:
            ValueError: unknown dtype, negative dimension, columns that cannot be cut so, or a name twice.
        """
        shards = shards or {}
        entries = []
        offset = 0
        for name, dtype, dimensions in named_specs:
            shape = tuple(int(dimension) for dimension in dimensions)
            nbytes = _element_bytes(name, dtype) * math.prod(shape)
            entries.append(
                TensorEntry(
                    name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes, shards=shards.get(name, 1)
                )
            )
            offset = _align(offset + nbytes)
        return cls(entries=tuple(entries), total_bytes=offset)

    def mismatch(self, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
        """What keeps these tensors from being those of a model, name -> (dtype, shape); None if they are.

        Names up to three tensors of each kind of mismatch.
        """
        present = {entry.name: (entry.dtype, entry.shape) for entry in self.entries}
        other = [name for name in expected if name in present and present[name] != expected[name]]
        found = {
            "missing": [name for name in expected if name not in present],
            "not of the model": [name for name in present if name not in expected],
            "of another shape or dtype": [
                f"{name} is {_spec(*present[name])}, the model has {_spec(*expected[name])}" for name in other
            ],
        }
        parts = [f"{len(names)} {what} ({'; '.join(names[:3])})" for what, names in found.items() if names]
        return f"of its {len(present)} tensors and the model's {len(expected)}: {', '.join(parts)}" if parts else None

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and integers, for msgpack."""
        return {
            "total_bytes": self.total_bytes,
            "entries": [[e.name, e.dtype, list(e.shape), e.offset, e.nbytes, e.shards] for e in self.entries],
        }

    @classmethod
    def from_dict(cls, value: object) -> WeightLayout:
        """Inverse of `to_dict` for data from a file or a peer.

        Raises:
            ValueError: wrong structure, or the invariant does not hold; names the tensor.
        """
        if not isinstance(value, dict) or value.keys() != {"total_bytes", "entries"}:
            raise ValueError("weight layout: expected a map with the keys total_bytes and entries")
        total_bytes, rows = value["total_bytes"], value["entries"]
        if type(total_bytes) is not int or not isinstance(rows, list):
            raise ValueError("weight layout: total_bytes must be an integer and entries a list")
        return cls(
            entries=tuple(_entry(index, row) for index, row in enumerate(rows)),
            total_bytes=total_bytes,
        )

    def to_bytes(self) -> bytes:
        """`to_dict` as msgpack."""
        return msgspec.msgpack.encode(self.to_dict())

    @classmethod
    def from_bytes(cls, data: bytes) -> WeightLayout:
        """Inverse of `to_bytes`. Raises ValueError as `from_dict` does."""
        try:
            value = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"weight layout: not msgpack ({error})") from error
        return cls.from_dict(value)


def chunk_spans(total_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Cut `total_bytes` into chunks: [(start, stop), ...], all `chunk_bytes` long but the last.

    Raises:
        ValueError: a chunk size below 1 or a negative total.
    """
    if chunk_bytes < 1 or total_bytes < 0:
        raise ValueError(f"cannot cut {total_bytes} bytes into chunks of {chunk_bytes} bytes")
    return [(start, min(start + chunk_bytes, total_bytes)) for start in range(0, total_bytes, chunk_bytes)]


def _spec(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _element_bytes(name: str, dtype: str) -> int:
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise ValueError(
            f"weight layout: tensor {name!r} has dtype {dtype!r}; expected one of {', '.join(DTYPE_BYTES)}"
        ) from None


def _entry(index: int, row: object) -> TensorEntry:
    match row:
        case [str() as name, str() as dtype, list() as shape, int() as offset, int() as nbytes, int() as shards]:
            if all(type(dimension) is int for dimension in shape):
                return TensorEntry(
                    name=name, dtype=dtype, shape=tuple(shape), offset=offset, nbytes=nbytes, shards=shards
                )
            raise ValueError(f"weight layout: tensor {name!r} has shape {shape}; expected integers")
    raise ValueError(f"weight layout: entry {index} is {row!r}; expected [name, dtype, shape, offset, nbytes, shards]")


def _check(layout: WeightLayout) -> None:
    if layout.total_bytes < 0:
        raise ValueError(f"weight layout: total size of {layout.total_bytes} bytes")
    names: set[str] = set()
    for entry in layout.entries:
        if entry.name in names:
            raise ValueError(f"weight layout: tensor {entry.name!r} appears twice")
        names.add(entry.name)
        _check_entry(entry, layout.total_bytes)
    ordered = sorted(
        (entry for entry in layout.entries if entry.nbytes),
        key=lambda entry: entry.offset,
    )
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise ValueError(f"weight layout: tensor {after.name!r} overlaps tensor {before.name!r}")


def _check_entry(entry: TensorEntry, total_bytes: int) -> None:
    if any(dimension < 0 for dimension in entry.shape) or entry.offset < 0:
        raise ValueError(
            f"weight layout: tensor {entry.name!r} has shape {entry.shape} at offset {entry.offset}; "
            "neither may be negative"
        )
    expected = _element_bytes(entry.name, entry.dtype) * math.prod(entry.shape)
    if entry.nbytes != expected:
        raise ValueError(
            f"weight layout: tensor {entry.name!r} ({entry.dtype} {entry.shape}) says {entry.nbytes} bytes; "
            f"expected {expected}"
        )
    if entry.offset % ALIGNMENT:
        raise ValueError(f"weight layout: tensor {entry.name!r} at offset {entry.offset} is not 64-byte aligned")
    if entry.offset + entry.nbytes > total_bytes:
        raise ValueError(
            f"weight layout: tensor {entry.name!r} ends at byte {entry.offset + entry.nbytes}, "
            f"beyond the end of the buffer at {total_bytes}"
        )
    whole = entry.shards == 1
    if not whole and (entry.shards < 1 or len(entry.shape) != 2 or entry.shape[1] % entry.shards):
        raise ValueError(
            f"weight layout: tensor {entry.name!r} of shape {entry.shape} is cut into {entry.shards} shards; "
            "expected a matrix whose columns that number divides"
        )

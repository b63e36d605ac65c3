"""A matrix whose shards of columns are contiguous, as a torch tensor that whoever loads weights may slice as usual.

Invariant: it is the matrix. Slicing whole shards (what the weight loaders of a tensor-parallel engine do: `narrow` to the
columns of their rank) costs nothing and gives contiguous memory; every other operation sees the full matrix, put
together for it. So an engine that does not split where the trainer thought it would is slower, never wrong.

Used by `laminar.weights.tensors` only, which like this module is for those who have torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class ShardedMatrix(torch.Tensor):
    """[out, in], held as a view of [shards, out, in / shards]."""

    blocks: torch.Tensor  # [shards, out, in / shards]

    @staticmethod
    def __new__(cls, blocks: torch.Tensor) -> ShardedMatrix:
        """Wrap blocks of columns, [shards, out, in / shards], in the order of the columns."""
        shards, rows, width = blocks.shape
        matrix: ShardedMatrix = torch.Tensor._make_wrapper_subclass(
            cls, (rows, shards * width), dtype=blocks.dtype, device=blocks.device
        )
        matrix.blocks = blocks
        return matrix

    def full(self) -> torch.Tensor:
        """The matrix put together, a copy: [out, in], contiguous."""
        return self.blocks.permute(1, 0, 2).reshape(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Slices of shards and copies out of the matrix as they lie; all else on the full matrix."""
        kwargs = kwargs or {}
        if func is aten.copy_.default and not isinstance(args[0], cls):
            return _copy(*args, **kwargs)
        with torch.inference_mode(False):  # torch takes no inference tensor for a view of this one
            if func is aten.slice.Tensor and not kwargs:
                piece = _slice(*args)
                if piece is not None:
                    return piece
            elif func is aten.narrow.default:  # reaches us in inference mode; else as a slice
                matrix, dim, start, length = args
                return aten.slice.Tensor(matrix, dim, start, start + length)
            elif func in (aten.detach.default, aten.alias.default):
                return cls(args[0].blocks)
            return func(*tree_map_only(cls, cls.full, args), **tree_map_only(cls, cls.full, kwargs))


def _slice(
    matrix: ShardedMatrix, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> torch.Tensor | None:
    """Rows start to stop, or columns where both are ends of shards; None for anything else."""
    if step != 1:
        return None
    length = matrix.shape[dim]
    start, stop, _ = slice(start, stop).indices(length)
    if stop < start:
        return None
    if dim % 2 == 0:
        return ShardedMatrix(matrix.blocks[:, start:stop])
    width = matrix.blocks.shape[2]
    if width == 0 or start % width or stop % width or start == stop:
        return None
    blocks = matrix.blocks[start // width : stop // width]
    return blocks[0] if len(blocks) == 1 else ShardedMatrix(blocks)


def _copy(target: torch.Tensor, matrix: ShardedMatrix, non_blocking: bool = False) -> torch.Tensor:
    """`target.copy_(matrix)` without putting the matrix together first."""
    if target.shape != matrix.shape:  # broadcast
        return target.copy_(matrix.full(), non_blocking)
    columns_of_shards(target, len(matrix.blocks)).copy_(matrix.blocks, non_blocking)
    return target


def columns_of_shards(matrix: torch.Tensor, shards: int) -> torch.Tensor:
    """A view of a plain matrix [out, in] as [shards, out, in / shards]."""
    return matrix.unflatten(1, (shards, matrix.shape[1] // shards)).permute(1, 0, 2)

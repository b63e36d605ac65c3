"""From GPU tensors into the file of a version: through two pinned buffers, on a stream of its own.

Invariant: two pieces of at most `STAGING_BYTES` are under way, however large the tensors. While the copy engine fills one
buffer the CPU empties the other into the file, and what is left of a tensor goes on while the next one is gathered.

The CUDA half (`CudaLane`) has not been run on a GPU; the order of the work is tested with lanes on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

STAGING_BYTES = 32 << 20  # of one buffer: long copies, and small beside any model that needs them
BUFFERS = 2


class Filled(Protocol):
    """A buffer that is being filled."""

    def synchronize(self) -> None:
        """Wait until it is full."""
        ...


class Lane(Protocol):
    """Takes pieces of tensors into buffers, in the background."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """A new buffer, uint8 [nbytes], on the CPU."""
        ...

    def fill(self, buffer: torch.Tensor, piece: torch.Tensor) -> Filled:
        """Begin to copy a piece into a buffer of its shape, casting it to the buffer's dtype."""
        ...


class CudaLane:
    """A stream beside the one that trains and gathers. Untested on a GPU."""

    def __init__(self) -> None:
        """Make the stream, on the current device."""
        self._stream = torch.cuda.Stream()

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory, for copies that run beside the CPU."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def fill(self, buffer: torch.Tensor, piece: torch.Tensor) -> Filled:
        """Cast on the GPU, then copy; the piece's memory is not used anew before that is done."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            buffer.copy_(piece.to(buffer.dtype).contiguous(), non_blocking=True)
            piece.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event


@dataclass(kw_only=True, slots=True)
class _Pending:
    """A buffer on its way into the file."""

    filled: Filled
    target: torch.Tensor
    buffer: torch.Tensor  # of the target's shape and dtype


class Staging:
    """`copy` for `laminar.weights.tensors.write_tensors`; `finish` before the version is committed."""

    def __init__(self, lane: Lane, nbytes: int = STAGING_BYTES) -> None:
        """Allocate the buffers, `nbytes` each."""
        self._lane = lane
        self._nbytes = nbytes
        self._buffers = [lane.buffer(nbytes) for _ in range(BUFFERS)]
        self._pending: list[_Pending] = []  # oldest first
        self._turn = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor into a view of the file; the last pieces are in flight when this returns."""
        for into, piece in _pieces(target, source, self._nbytes):
            if len(self._pending) == BUFFERS:
                self._drain()
            flat = self._buffers[self._turn][: into.numel() * into.element_size()]
            self._turn = (self._turn + 1) % BUFFERS
            buffer = flat.view(into.dtype).view(into.shape)
            self._pending.append(_Pending(filled=self._lane.fill(buffer, piece), target=into, buffer=buffer))

    def finish(self) -> None:
        """Wait for what is in flight."""
        while self._pending:
            self._drain()

    def abandon(self) -> None:
        """After an error: wait until nobody writes into the buffers, and leave the file alone."""
        while self._pending:
            self._pending.pop(0).filled.synchronize()

    def _drain(self) -> None:
        oldest = self._pending.pop(0)
        oldest.filled.synchronize()
        oldest.target.copy_(oldest.buffer)


def _pieces(target: torch.Tensor, source: torch.Tensor, limit: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut both alike into pieces of at most `limit` bytes of the target's dtype (or of one element)."""
    if target.numel() * target.element_size() <= limit or target.ndim == 0:
        yield target, source
        return
    rows = limit // (target[0].numel() * target.element_size())
    if rows:
        yield from zip(target.split(rows), source.split(rows), strict=True)
        return
    for into, piece in zip(target, source, strict=True):
        yield from _pieces(into, piece, limit)

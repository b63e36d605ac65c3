"""What the receiver at a hop asks of the sender: the layout, or chunks of the version.

Invariant: a `Want` that was unpacked names chunks and sizes that make sense together; whatever else arrives is a HopError.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar.workers.relay.hop import MAX_PAYLOAD_BYTES, Bytes, HopError

MAX_WANT_BYTES = 1 << 24
MAX_BASES = 64


class _Wire(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    chunk_bytes: int
    layout_checksum: int
    count: int
    chunks: bytes
    bases: tuple[int, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class Want:
    """Send me these chunks; or, where `layout_checksum` is None, the layout first."""

    chunk_bytes: int  # size of the receiver's chunks; the sender follows
    layout_checksum: int | None = None  # of the layout that the receiver has; None: it has none
    chunks: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))  # bool [chunks]; wanted ones
    bases: tuple[int, ...] = ()  # versions that the receiver holds: these chunks may come as deltas of one

    def pack(self) -> Bytes:
        """As the payload of a frame."""
        wire = _Wire(
            chunk_bytes=self.chunk_bytes,
            layout_checksum=-1 if self.layout_checksum is None else self.layout_checksum,
            count=len(self.chunks),
            chunks=np.packbits(self.chunks).tobytes(),
            bases=self.bases,
        )
        return np.frombuffer(msgspec.msgpack.encode(wire), np.uint8)

    @classmethod
    def unpack(cls, payload: Bytes, peer: str) -> Want:
        """Inverse of `pack`. Raises HopError naming the peer."""
        try:
            wire = msgspec.msgpack.decode(payload.data, type=_Wire)
        except msgspec.DecodeError as error:
            raise HopError(f"{peer} wants nonsense: {error}") from error
        bits = np.unpackbits(np.frombuffer(wire.chunks, np.uint8))
        fits = 0 <= wire.count <= len(bits) < wire.count + 8
        if not fits or not 1 <= wire.chunk_bytes <= MAX_PAYLOAD_BYTES or len(wire.bases) > MAX_BASES:
            raise HopError(
                f"{peer} wants nonsense: {wire.count} chunks of {wire.chunk_bytes} bytes, {len(bits)} bits, "
                f"{len(wire.bases)} bases"
            )
        return cls(
            chunk_bytes=wire.chunk_bytes,
            layout_checksum=None if wire.layout_checksum < 0 else wire.layout_checksum,
            chunks=bits[: wire.count].astype(np.bool_),
            bases=wire.bases,
        )

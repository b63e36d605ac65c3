"""The version that a relay carries: its memory, and which of its chunks are here and checked.

Invariants:
- The memory is that of the version's own file: it is received into and sent from.
- A chunk counts as checked only after its checksum held, and its memory is given to nobody afterwards.
- The version is committed only when all chunks are checked; nothing of it is visible before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from laminar.weights.checksum import checksum
from laminar.weights.delta import element_widths
from laminar.weights.layout import WeightLayout, chunk_spans
from laminar.weights.store import WeightStore
from laminar.weights.version_file import VersionReader, VersionWriter
from laminar.workers.relay.hop import MAX_PAYLOAD_BYTES, Bytes
from laminar.workers.relay.want import MAX_BASES

MAX_KEPT_BYTES = 256 << 20  # of delta payloads that wait to be forwarded as they came


@dataclass(kw_only=True, slots=True)
class ChunkTable:
    """A version cut into chunks of one size."""

    spans: list[tuple[int, int]]  # in bytes
    checked: NDArray[np.bool_]  # bool [chunks]: is here, and its checksum held
    missing: int  # chunks that are not checked
    checksums: dict[int, int] = field(default_factory=dict)  # of checked chunks, as far as known
    log: list[int] = field(default_factory=list)  # chunks in the order in which they were checked here

    @classmethod
    def cut(cls, nbytes: int, chunk_bytes: int, *, complete: bool) -> ChunkTable:
        """All chunks are checked, or none."""
        spans = chunk_spans(nbytes, chunk_bytes)
        checked = np.full(len(spans), complete, np.bool_)
        return cls(spans=spans, checked=checked, missing=0 if complete else len(spans))


@dataclass(kw_only=True, slots=True, frozen=True)
class Delta:
    """A chunk as what changed against the same chunk of a base."""

    base: int  # policy version
    payload: Bytes
    checksum: int  # of the payload


class CarriedVersion:
    """One version on this relay, complete or on its way."""

    def __init__(self, store: WeightStore, policy_version: int, chunk_bytes: int) -> None:
        """Map the version if the store holds it; else its layout is not known yet.

        Raises:
            ValueError: the chunk size is not between 1 byte and 1 GiB, or the store's file is damaged.
        """
        if not 1 <= chunk_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"chunks of {chunk_bytes} bytes; expected 1 to {MAX_PAYLOAD_BYTES}")
        self.policy_version = policy_version
        self.chunk_bytes = chunk_bytes
        self.layout: WeightLayout | None = None
        self.layout_raw: Bytes = np.empty(0, np.uint8)  # uint8 [layout bytes], msgpack
        self.layout_checksum = 0
        self.table = ChunkTable.cut(0, chunk_bytes, complete=False)
        self.stored = False  # complete, and visible in the store
        self.received_here = False
        self._store = store
        self._memory: Bytes = np.empty(0, np.uint8)  # uint8 [total_bytes]
        self._writer: VersionWriter | None = None
        self._bases: dict[int, VersionReader] = {}
        self._kept: dict[int, Delta] = {}
        self._kept_bytes = 0
        self._suspects: set[int] = set()
        self._widths: list[int] = []
        try:
            with store.open(policy_version) as reader:
                self._memory = reader.buffer
                self._know(np.frombuffer(reader.layout.to_bytes(), np.uint8), reader.layout, complete=True)
            self.stored = True
        except FileNotFoundError:
            pass

    @property
    def nbytes(self) -> int:
        """Size of the version, 0 while unknown."""
        return 0 if self.layout is None else self.layout.total_bytes

    def learn_layout(self, raw: Bytes) -> None:
        """Begin the version's file; its memory is reserved as chunks come, so that the chain does not wait for that.

        Raises:
            ValueError: it is no layout.
            UserError: the shared memory is too small.
            FileExistsError: somebody else writes this version into the store.
        """
        try:
            layout = WeightLayout.from_bytes(raw.tobytes())
        except ValueError as error:
            raise ValueError(f"version {self.policy_version}: {error}") from error
        self._writer = self._store.begin(self.policy_version, layout, reserve=False)
        self._memory = self._writer.buffer
        self._know(raw, layout, complete=False)

    def _know(self, raw: Bytes, layout: WeightLayout, *, complete: bool) -> None:
        self.table = ChunkTable.cut(layout.total_bytes, self.chunk_bytes, complete=complete)
        self.layout, self.layout_raw, self.layout_checksum = layout, raw, checksum(raw)

    def table_for(self, chunk_bytes: int) -> ChunkTable | None:
        """The version cut for a receiver with chunks of this size; None if that cannot be done yet."""
        if self.layout is None:
            return None
        if chunk_bytes == self.chunk_bytes:
            return self.table
        return ChunkTable.cut(self.nbytes, chunk_bytes, complete=True) if self.stored else None

    def memory(self, span: tuple[int, int]) -> Bytes:
        """A part of the version's own memory."""
        return self._memory[span[0] : span[1]]

    def reserved(self, span: tuple[int, int]) -> Bytes:
        """A part of the version's own memory, to be written to. Raises UserError: the shared memory is too small."""
        assert self._writer is not None
        self._writer.reserve(span[1])
        return self.memory(span)

    def checksum(self, table: ChunkTable, index: int) -> int:
        """Checksum of a checked chunk, taken once."""
        if index not in table.checksums:
            table.checksums[index] = checksum(self.memory(table.spans[index]))
        return table.checksums[index]

    def check(self, index: int, found: int) -> None:
        """The chunk's memory holds what its sender holds: `found` is its checksum."""
        table = self.table
        assert not table.checked[index]
        table.checked[index] = True
        table.missing -= 1
        table.checksums[index] = found
        table.log.append(index)

    def suspect(self, index: int) -> None:
        """A hop that is closed may still write into this chunk's memory: look at it again before the commit."""
        self._suspects.add(index)

    def commit(self) -> list[int]:
        """Make the complete version visible; or return chunks that a closed hop has damaged, which are missing again."""
        assert self._writer is not None and not self.table.missing
        table = self.table
        damaged = [i for i in sorted(self._suspects) if checksum(self.memory(table.spans[i])) != table.checksums[i]]
        self._suspects.clear()
        for index in damaged:
            table.checked[index] = False
            table.missing += 1
        if not damaged:
            self._writer.commit()
            self.stored = self.received_here = True
        return damaged

    def bases(self) -> tuple[int, ...]:
        """Versions that deltas may refer to, oldest first; from now on they are mapped, whatever retention does."""
        for policy_version in self._store.versions()[-MAX_BASES:]:
            if policy_version != self.policy_version:
                self._map_base(policy_version)
        return tuple(sorted(self._bases))

    def base(self, policy_version: int) -> Bytes | None:
        """Memory of a version with the same layout, uint8 [total_bytes]; None if this relay has none such."""
        reader = self._map_base(policy_version)
        return None if reader is None or reader.layout != self.layout else reader.buffer

    def _map_base(self, policy_version: int) -> VersionReader | None:
        if policy_version not in self._bases:
            try:
                self._bases[policy_version] = self._store.open(policy_version)
            except (FileNotFoundError, ValueError):
                return None
        return self._bases[policy_version]

    def element_bytes(self, index: int) -> int:
        """Width of most elements of a chunk of `table`."""
        if not self._widths and self.layout is not None:
            self._widths = element_widths(self.layout, self.table.spans)
        return self._widths[index]

    def keep_delta(self, index: int, delta: Delta) -> None:
        """Keep what came in, to forward it as it is, unless too much waits already."""
        if self._kept_bytes + delta.payload.nbytes <= MAX_KEPT_BYTES:
            self.forget_delta(index)
            self._kept[index] = delta
            self._kept_bytes += delta.payload.nbytes

    def kept_delta(self, index: int) -> Delta | None:
        """What came in for this chunk, if it was kept."""
        return self._kept.get(index)

    def forget_delta(self, index: int) -> None:
        """It was forwarded."""
        if delta := self._kept.pop(index, None):
            self._kept_bytes -= delta.payload.nbytes

    def forget_deltas(self) -> None:
        """Nobody is there to forward them to."""
        self._kept.clear()
        self._kept_bytes = 0

    def close(self) -> None:
        """Let go of everything; an incomplete version is discarded."""
        self.forget_deltas()
        for reader in self._bases.values():
            reader.close()
        self._bases.clear()
        self._memory = np.empty(0, np.uint8)
        if self._writer is not None:
            self._writer.discard()

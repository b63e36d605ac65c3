"""A chunk of weights as what changed against the same chunk of another version (its base).

Invariants:
- Applied to the base that it was made from, a payload gives back the new chunk bit for bit, whatever the bytes are.
- A payload that this module did not make raises ValueError; nothing is ever written outside `out`.

A chunk is compared in 8-byte words, and the words that differ in elements of `element_bytes`. A changed element is a gap
(unchanged elements since the one before) and a step (difference of the two bit patterns as integers: for neighbouring
floating-point values of one sign +1 or -1, which is what a small learning rate makes). `docs/deltas.md` has the format.

Imports no torch: relays use it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar.weights.layout import DTYPE_BYTES, WeightLayout

FORMAT = 1
MAX_CHANGED_SHARE = 0.125  # of a chunk's elements; more take a core longer to encode than 10 Gbit/s to carry in full
WORD_BYTES = 8
BLOCK_WORDS = 1 << 15  # compared at once: 256 KiB of either version and what is found in them stay in a core's cache

# format, element bytes, gap bytes, step bits (0: values in full), chunk bytes, changed elements, gaps (with escapes),
# steps that do not fit (given in full)
_HEADER = struct.Struct("<BBBBQIII")

_UNSIGNED: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED: dict[int, type[np.signedinteger]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_STEP_BITS = (4, 8)


class _Sections(NamedTuple):
    """Where the parts of a payload lie, in the order in which they come; all in elements of their own width."""

    element_bytes: int
    gap_bytes: int
    step_bits: int
    changed: int
    gaps: int
    misfits: int
    rest: int  # bytes at the end of the chunk that make no whole word

    def nbytes(self) -> int:
        """Size of the payload."""
        return sum(self.sizes()) + _HEADER.size

    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of the gaps, the steps, the full values and the rest."""
        in_full = self.misfits if self.step_bits else self.changed
        steps = -(-self.changed * self.step_bits // 8)
        return self.gaps * self.gap_bytes, steps, in_full * self.element_bytes, self.rest


def encode_chunk(new: NDArray[np.uint8], base: NDArray[np.uint8], element_bytes: int = 2) -> NDArray[np.uint8] | None:
    """What turns `base` into `new`; None if sending `new` in full is better.

    Args:
        new: the chunk, uint8 [N], contiguous.
        base: the same bytes of the base version, uint8 [N], contiguous.
        element_bytes: 1, 2, 4 or 8: width of most elements (`element_widths`). Another one costs size, never exactness.

    Raises:
        ValueError: the arrays do not fit each other, or `element_bytes` is another number.
    """
    _check_arrays(new, base)
    if element_bytes not in _UNSIGNED:
        raise ValueError(f"delta: elements of {element_bytes} bytes; expected one of {', '.join(map(str, _UNSIGNED))}")
    found = _changes(new, base, element_bytes)
    if found is None:
        return None
    positions, values, before = found
    gaps, gap_bytes = _encode_gaps(positions)
    steps, misfits, step_bits = _encode_steps(values, before)
    sections = _Sections(
        element_bytes=element_bytes,
        gap_bytes=gap_bytes,
        step_bits=step_bits,
        changed=len(positions),
        gaps=len(gaps),
        misfits=len(misfits) if step_bits else 0,
        rest=len(new) % WORD_BYTES,
    )
    if sections.nbytes() >= len(new):
        return None
    header = _HEADER.pack(
        FORMAT, element_bytes, gap_bytes, step_bits, len(new), sections.changed, sections.gaps, sections.misfits
    )
    parts = (gaps, steps, misfits, new[len(new) - sections.rest :])
    return np.concatenate([np.frombuffer(header, np.uint8), *(part.view(np.uint8) for part in parts)])


def apply_chunk(payload: NDArray[np.uint8], base: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Write the chunk that `payload` makes of `base` into `out`.

    Args:
        payload: from `encode_chunk`, uint8 [M], contiguous.
        base: the same bytes of the base version, uint8 [N], contiguous.
        out: uint8 [N], contiguous; may be `base` itself, else must not overlap it.

    Raises:
        ValueError: the payload is no delta, is damaged or is one of a chunk of another size. `out` is as it was.
    """
    _check_arrays(out, base)
    sections, parts = _split(payload, len(base))
    gaps, steps, misfits, rest = parts
    unsigned = _UNSIGNED[sections.element_bytes]
    words = len(base) // WORD_BYTES * WORD_BYTES
    positions = _decode_gaps(gaps, sections, words // sections.element_bytes)
    values = base[:words].view(unsigned)[positions]
    _apply_steps(values, steps, misfits.view(unsigned), sections)
    if out.ctypes.data != base.ctypes.data:
        np.copyto(out, base)
    out[:words].view(unsigned)[positions] = values
    out[words:] = rest


def element_widths(layout: WeightLayout, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes of the elements that fill most of each span [start, stop) of the layout's buffer; 2 in an empty one.

    Spans must come in order, as `chunk_spans` gives them.
    """
    entries = sorted((entry for entry in layout.entries if entry.nbytes), key=lambda entry: entry.offset)
    widths = []
    first = 0
    for start, stop in spans:
        while first < len(entries) and entries[first].offset + entries[first].nbytes <= start:
            first += 1
        filled = {2: 0}
        for index in range(first, len(entries)):
            entry = entries[index]
            if entry.offset >= stop:
                break
            inside = min(stop, entry.offset + entry.nbytes) - max(start, entry.offset)
            width = DTYPE_BYTES[entry.dtype]
            filled[width] = filled.get(width, 0) + inside
        widths.append(max(filled, key=lambda width: filled[width]))
    return widths


def _check_arrays(chunk: NDArray[np.uint8], base: NDArray[np.uint8]) -> None:
    for array in (chunk, base):
        if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"delta: expected contiguous uint8 [N], got {array.dtype} {list(array.shape)}")
    if len(chunk) != len(base):
        raise ValueError(f"delta: a chunk of {len(chunk)} bytes against a base of {len(base)} bytes")


def _changes(
    new: NDArray[np.uint8], base: NDArray[np.uint8], element_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]] | None:
    """Changed elements of the whole words: positions [C], new values [C], old values [C]. None if they are too many."""
    unsigned = _UNSIGNED[element_bytes]
    new_words, base_words = _words(new), _words(base)
    elements = WORD_BYTES // element_bytes
    limit = int(MAX_CHANGED_SHARE * len(new_words) * elements)
    found = []
    changed = 0  # at least
    for start in range(0, len(new_words), BLOCK_WORDS):
        block = slice(start, start + BLOCK_WORDS)
        words = np.flatnonzero(new_words[block] != base_words[block])
        changed += len(words)  # a changed word has a changed element
        if len(words) > MAX_CHANGED_SHARE * BLOCK_WORDS:  # it may have more of them
            differ = new_words[block].view(unsigned) != base_words[block].view(unsigned)
            changed += int(np.count_nonzero(differ)) - len(words)
        if changed > limit:
            return None
        found.append(words + start)
    words = np.concatenate(found) if found else np.empty(0, np.int64)
    values, before = new_words[words].view(unsigned), base_words[words].view(unsigned)
    chosen = np.flatnonzero(values != before)
    if len(chosen) > limit:
        return None
    positions = words[chosen // elements]
    positions *= elements
    positions += chosen & (elements - 1)
    return positions, values[chosen], before[chosen]


def _words(chunk: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return chunk[: len(chunk) // WORD_BYTES * WORD_BYTES].view(np.uint64)


def _encode_gaps(positions: NDArray[np.int64]) -> tuple[NDArray[np.unsignedinteger], int]:
    """(gaps, bytes of one), whichever width makes them fewer bytes.

    The greatest number of the width is an escape: so many unchanged elements, and the gap is not over.
    """
    gaps = np.diff(positions, prepend=-1)
    gaps -= 1
    long = np.flatnonzero(gaps >= 0xFF)  # few, if most of the width of one byte is to be of use
    short_escapes, long_escapes = (int(np.sum(gaps[long] // escape)) for escape in (0xFF, 0xFFFF))
    gap_bytes = 1 if len(gaps) + short_escapes <= 2 * (len(gaps) + long_escapes) else 2
    unsigned = _UNSIGNED[gap_bytes]
    escape = np.iinfo(unsigned).max
    escapes, remainders = np.divmod(gaps[long], escape)
    encoded = gaps.astype(unsigned)
    encoded[long] = remainders
    return np.insert(encoded, np.repeat(long, escapes), escape), gap_bytes


def _decode_gaps(gaps: NDArray[np.uint8], sections: _Sections, elements: int) -> NDArray[np.int64]:
    """Positions [C], ascending and below `elements`. Raises ValueError."""
    unsigned = _UNSIGNED[sections.gap_bytes]
    encoded = gaps.view(unsigned)
    is_gap = encoded != np.iinfo(unsigned).max
    ends = np.cumsum(encoded, dtype=np.int64)
    positions = ends[is_gap]
    positions += np.arange(len(positions))
    if len(positions) != sections.changed or (len(is_gap) and not is_gap[-1]):
        raise ValueError(f"delta: {len(positions)} gaps for {sections.changed} changed elements")
    if len(positions) and positions[-1] >= elements:
        raise ValueError(f"delta: element {positions[-1]} changed in a chunk of {elements} elements")
    return positions


def _encode_steps(
    values: NDArray[np.unsignedinteger], before: NDArray[np.unsignedinteger]
) -> tuple[NDArray[np.uint8], NDArray[np.unsignedinteger], int]:
    """(steps, full values of those that do not fit, bits of a step), in the number of bits that takes least bytes.

    The least number of the bits says that the step does not fit.
    """
    nbytes = values.itemsize
    steps = (values - before).view(_SIGNED[nbytes])  # modulo 2**bits, as is the sum that undoes it
    best, best_size = 0, len(values) * nbytes
    misfit = np.empty(0, bool)
    for bits in _STEP_BITS:
        if bits == 8 * nbytes:
            continue
        most = (1 << bits - 1) - 1
        fits_not = (steps < -most) | (steps > most)
        size = -(-len(values) * bits // 8) + int(np.count_nonzero(fits_not)) * nbytes
        if size < best_size:
            best, best_size, misfit = bits, size, fits_not
    if best == 0:
        return np.empty(0, np.uint8), values, 0
    small: NDArray[np.uint8] = steps.astype(np.int8).view(np.uint8)
    small[misfit] = 1 << best - 1
    if best == 4:
        nibbles: NDArray[np.uint8] = small & np.uint8(0xF)
        packed: NDArray[np.uint8] = nibbles[::2].copy()
        packed[: len(nibbles) // 2] |= nibbles[1::2] << 4
        return packed, values[misfit], 4
    return small, values[misfit], 8


def _apply_steps(
    values: NDArray[np.unsignedinteger],
    steps: NDArray[np.uint8],
    full: NDArray[np.unsignedinteger],
    sections: _Sections,
) -> None:
    """Turn the base's values [C] into the new ones, in place. Raises ValueError."""
    if sections.step_bits == 0:
        values[:] = full
        return
    if sections.step_bits == 4:
        nibbles = np.empty(2 * len(steps), np.uint8)
        nibbles[::2] = steps << 4
        nibbles[1::2] = steps & 0xF0
        small = nibbles[: sections.changed].view(np.int8) >> 4
    else:
        small = steps.view(np.int8)
    misfit = np.flatnonzero(small == -(1 << sections.step_bits - 1))
    if len(misfit) != len(full):
        raise ValueError(f"delta: {len(full)} full values for {len(misfit)} steps that do not fit")
    values += small.astype(_SIGNED[sections.element_bytes]).view(values.dtype)
    values[misfit] = full


def _split(payload: NDArray[np.uint8], chunk_bytes: int) -> tuple[_Sections, list[NDArray[np.uint8]]]:
    """The sections that a payload's header states, and their bytes. Raises ValueError if they do not fit."""
    if payload.dtype != np.uint8 or payload.ndim != 1 or len(payload) < _HEADER.size:
        raise ValueError(f"delta: {payload.dtype} {list(payload.shape)} is no payload")
    header = payload[: _HEADER.size].tobytes()
    form, element_bytes, gap_bytes, step_bits, stated, changed, gaps, misfits = _HEADER.unpack(header)
    known = form == FORMAT and element_bytes in _UNSIGNED and gap_bytes in (1, 2) and step_bits in (0, *_STEP_BITS)
    if not known or (step_bits == 0 and misfits):
        raise ValueError(f"delta: a payload that this version does not read (header {header.hex()})")
    if stated != chunk_bytes:
        raise ValueError(f"delta: a payload for a chunk of {stated} bytes, but the base has {chunk_bytes} bytes")
    rest = chunk_bytes % WORD_BYTES
    sections = _Sections(element_bytes, gap_bytes, step_bits, changed, gaps, misfits, rest)
    if sections.nbytes() != len(payload):
        raise ValueError(f"delta: a payload of {len(payload)} bytes whose header says {sections.nbytes()}")
    ends = np.cumsum(sections.sizes()) + _HEADER.size
    return sections, np.split(payload[_HEADER.size :], ends[:-1] - _HEADER.size)

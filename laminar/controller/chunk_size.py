"""How large the chunks of a broadcast are: the paper's formula, appendix D."""

from __future__ import annotations

import math

MIB = 1 << 20
UNKNOWN_BYTES = 4 * MIB  # before anything was measured: within noise of the best on all machines tried (docs/mpi.md)
SMALLEST_BYTES, LARGEST_BYTES = MIB // 4, 16 * MIB


def best_chunks(nbytes: int, relays: int, latency_s: float, bytes_per_s: float) -> float:
    """Chunks k that make (p - 2 + k)(alpha + beta m / k) least: sqrt(beta m (p - 2) / alpha).

    Args:
        nbytes: m, that travel.
        relays: p, the master relay included.
        latency_s: alpha, per chunk and hop.
        bytes_per_s: 1 / beta, of one hop.
    """
    return math.sqrt(nbytes / bytes_per_s * max(0, relays - 2) / latency_s)


def best_chunk_bytes(nbytes: int, relays: int, latency_s: float, bytes_per_s: float) -> int:
    """Size of a chunk by the formula, a whole number of pages, in bounds that keep its costs per chunk and memory small.

    Zero for `latency_s` or `bytes_per_s` means that it was not measured.
    """
    if latency_s <= 0 or bytes_per_s <= 0:
        return UNKNOWN_BYTES
    chunks = best_chunks(nbytes, relays, latency_s, bytes_per_s)
    ideal = nbytes / chunks if chunks >= 1 else float(LARGEST_BYTES)
    return int(min(max(ideal, SMALLEST_BYTES), LARGEST_BYTES)) // 4096 * 4096

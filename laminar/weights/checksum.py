"""The checksum that travels with every chunk of weights, and stays with every file of a checkpoint.

XXH3 (64 bit) runs faster than memory delivers (29 GiB/s on a cached 4 MiB chunk where a memory copy reaches 13 to 23, CRC-32
of zlib 4.0 and BLAKE3 4.5), so that it may be taken at every hop. It finds damage, not malice: peers are authenticated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

READ_BYTES = 1 << 22


def checksum(data: NDArray[np.uint8]) -> int:
    """64-bit checksum of contiguous bytes, uint8 [N]."""
    return xxhash.xxh3_64_intdigest(data.data)


def file_checksum(path: Path, on_bytes: Callable[[int], None] = lambda nbytes: None) -> int:
    """The same of a file's contents; `on_bytes` hears of each piece that was read. Raises OSError."""
    hasher, buffer = xxhash.xxh3_64(), memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while nbytes := file.readinto(buffer):
            hasher.update(buffer[:nbytes])
            on_bytes(nbytes)
    return hasher.intdigest()

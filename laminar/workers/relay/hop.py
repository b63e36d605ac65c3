"""One hop of the chain, seen from one of its ends: frames go to, and come from, one neighbour.

A frame is a head of fixed size and a payload whose size the head states. Frames that go one way arrive complete and in the
order in which they were sent. The transfer (`transfer.py`) knows no more of its neighbours than this; `MpiHop` stands for
relays of one mpirun world, `TcpHop` for all others, and the controller chooses per hop.

Invariant: nothing here blocks, and memory that was given to `send`, or that `place` gave, is not copied.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]  # contiguous

MAX_PAYLOAD_BYTES = 1 << 30
FULL = -1  # base of a chunk that is sent as it is

_HEAD = struct.Struct("<4sHHIqqQQQ")
_MAGIC = b"LMNR"
HEAD_BYTES = _HEAD.size


class HopError(Exception):
    """The neighbour, or the way to it, is lost, or it does not speak as it should; one line for a person."""


class FrameKind(IntEnum):
    """What a frame says."""

    WANT = 1  # receiver: send me these chunks; the payload is a `Want`
    LAYOUT = 2  # sender: the layout of the version (msgpack); `index` is the number of chunks
    CHUNK = 3  # sender: one chunk
    DONE = 4  # receiver: I have all of it


@dataclass(kw_only=True, slots=True, frozen=True)
class FrameHead:
    """What stands before every payload."""

    kind: FrameKind
    policy_version: int  # that is carried
    nbytes: int = 0  # of the payload
    checksum: int = 0  # of the payload
    index: int = 0  # CHUNK: which one; LAYOUT: how many there are
    base: int = FULL  # CHUNK: the version that the payload is a delta of, or FULL
    result_checksum: int = 0  # CHUNK: of the chunk once the delta is applied

    def pack(self) -> bytes:
        """As HEAD_BYTES bytes."""
        return _HEAD.pack(
            _MAGIC,
            self.kind,
            0,
            self.index,
            self.policy_version,
            self.base,
            self.nbytes,
            self.checksum,
            self.result_checksum,
        )

    @classmethod
    def unpack(cls, data: bytes) -> FrameHead:
        """Inverse of `pack`. Raises HopError for anything else."""
        magic, kind, _, index, policy_version, base, nbytes, checksum, result_checksum = _HEAD.unpack(data)
        if magic != _MAGIC or kind not in FrameKind.__members__.values() or nbytes > MAX_PAYLOAD_BYTES:
            raise HopError(f"not the head of a frame: {data.hex()}")
        return cls(
            kind=FrameKind(kind),
            policy_version=policy_version,
            nbytes=nbytes,
            checksum=checksum,
            index=index,
            base=base,
            result_checksum=result_checksum,
        )


Place = Callable[[FrameHead], Bytes]
"""Gives the memory, exactly `head.nbytes` long, that a frame's payload is to arrive in; raises HopError to refuse it."""


class Hop(Protocol):
    """The way to and from one neighbour, from one order of the controller to the next."""

    peer: str  # for messages to a person, e.g. "relay-2"

    @property
    def unsent(self) -> int:
        """Frames given to `send` whose memory may not be changed yet."""
        ...

    def send(self, head: FrameHead, payload: Bytes | None = None) -> None:
        """Queue a frame; the payload must stay as it is until the frame is no longer `unsent`."""
        ...

    def receive(self) -> tuple[FrameHead, Bytes] | None:
        """The next frame that has arrived completely, with the memory that `place` gave for it."""
        ...

    def advance(self) -> bool:
        """Do what can be done without waiting; false if that was nothing. Raises HopError when the neighbour is lost."""
        ...

    def close(self) -> None:
        """Give up whatever is under way; the memory involved is kept until the transport no longer touches it."""
        ...

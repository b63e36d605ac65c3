"""Messages to frames and back: `[type name, msgpack header, raw array, raw array, ...]`.

The header is decoded straight into the declared dataclass (msgspec), so a peer's bytes never become anything but a
message of a known type with checked fields. Arrays are not copied on the way out, and are read-only views on the way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from laminar.protocol.messages import MESSAGE_TYPES

ARRAY_DTYPES = ("uint8", "int32", "int64", "float32")
_DTYPE_NAMES = {np.dtype(name): name for name in ARRAY_DTYPES}  # numpy makes the name anew whenever it is asked


class CodecError(Exception):
    """Frames that are not a message of this protocol."""


class Codec:
    """Encoder and decoder for one channel; not thread-safe (a channel belongs to one loop anyway)."""

    def __init__(self) -> None:
        self._types = {cls.__name__.encode(): cls for cls in MESSAGE_TYPES}
        self._out: list[Any] = []
        self._in: Sequence[Any] = ()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._array_out)
        self._decoders: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
            name: msgspec.msgpack.Decoder(cls, dec_hook=self._array_in) for name, cls in self._types.items()
        }

    def encode(self, message: object) -> list[Any]:
        """Frames of a message; array frames are views of the message's own memory.

        Raises:
            CodecError: the type is not declared in `messages/`, or an array's dtype is not allowed.
        """
        name = type(message).__name__.encode()
        if self._types.get(name) is not type(message):
            raise CodecError(f"{type(message).__name__} is not a message of the protocol")
        self._out = []
        header = self._encoder.encode(message)
        frames = [name, header, *self._out]
        self._out = []
        return frames

    def decode(self, frames: Sequence[Any]) -> Any:
        """The message in these frames (bytes or buffers).

        Raises:
            CodecError: unknown type, malformed header, or arrays that do not fit their description.
        """
        if len(frames) < 2:
            raise CodecError(f"a message has at least 2 frames, got {len(frames)}")
        name = bytes(frames[0])
        decoder = self._decoders.get(name)
        if decoder is None:
            raise CodecError(f"unknown message type {name[:64]!r}")
        self._in = frames[2:]
        try:
            return decoder.decode(frames[1])
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, TypeError) as error:
            raise CodecError(f"malformed {name.decode()}: {error}") from error
        finally:
            self._in = ()

    def _array_out(self, value: object) -> object:
        if not isinstance(value, np.ndarray):
            raise CodecError(f"cannot encode {type(value).__name__}")
        name = _DTYPE_NAMES.get(value.dtype)
        if name is None or value.ndim != 1:
            raise CodecError(f"cannot encode an array of {value.dtype} with {value.ndim} dimensions")
        self._out.append(np.ascontiguousarray(value).data)
        return (len(self._out) - 1, name, value.shape[0])

    def _array_in(self, cls: type, value: object) -> object:
        if cls is not np.ndarray:
            raise TypeError(f"no decoder for {cls}")
        if not (isinstance(value, list) and len(value) == 3):
            raise ValueError(f"an array is described by 3 fields, got {value!r}")
        index, dtype, length = value
        if dtype not in ARRAY_DTYPES or not isinstance(index, int) or not 0 <= index < len(self._in):
            raise ValueError(f"array {value!r} with {len(self._in)} array frames")
        array = np.frombuffer(self._in[index], dtype=dtype)
        if array.shape[0] != length:
            raise ValueError(f"array frame {index} holds {array.shape[0]} values, announced {length}")
        array.flags.writeable = False
        return array

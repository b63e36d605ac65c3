"""The file in shared memory that a trajectory's KV travels in: header, layout, token ids, then keys and values.

Invariants: a file is written under a hidden name and renamed when it is complete; a file that passed `KvReader.check` and
whose `payload` was handed out holds exactly the KV of a prefix of the context, made by the version that is asked for.
A hidden file is locked as long as its writer lives, so that a dead writer's can be told and removed.

Imports no torch: who carries such a file between hosts needs none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from laminar.weights.checksum import checksum

MAGIC = b"LAMINARK"
FORMAT = 1
ALIGNMENT = 64

# magic, format, bytes of the layout, policy version, tokens, bytes of keys and values, their checksum
_HEADER = struct.Struct("<8sIIqQQQ")
_CRC = struct.Struct("<I")  # of header, layout and token ids; follows them


class KvRefused(Exception):
    """This file is not the KV that is needed; one line for a person."""


def shard_path(path: Path, shard: int) -> Path:
    """Where one shard of an export lies: a tensor parallel engine writes one file per rank."""
    return path.with_name(f"{path.name}.{shard}")


class HiddenKvFile:
    """Reserved, mapped memory that becomes a file of KV. Use as a context manager: what was not committed goes."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Reserve it; the file lies at `path` after `commit`.

        Raises:
            OSError: the shared memory is too small, or somebody writes this file.
        """
        self._path = path
        self._hidden = path.with_name(f".{path.name}.partial")
        self._fd = os.open(self._hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Before the first byte is written: a full /dev/shm is an error here, and a SIGBUS later.
            os.posix_fallocate(self._fd, 0, nbytes)
            self.map = mmap.mmap(self._fd, nbytes)
        except BaseException:
            self._hidden.unlink(missing_ok=True)
            os.close(self._fd)
            raise
        self._open = True

    def commit(self) -> None:
        """Make the file visible under its name."""
        os.rename(self._hidden, self._path)
        self._close()

    def _close(self) -> None:
        self._open = False
        with contextlib.suppress(BufferError):  # somebody holds a view: its end unmaps
            self.map.close()
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._hidden.unlink(missing_ok=True)
            self._close()


class KvWriter(HiddenKvFile):
    """One export being written; `buffer` is the mapping of the file itself."""

    def __init__(
        self, path: Path, *, layout: str, policy_version: int, token_ids: NDArray[np.int32], nbytes: int
    ) -> None:
        """Reserve the memory.

        Args:
            path: where the file lies after `commit`.
            layout: how keys and values lie in the buffer, model and dtype included: importers compare it.
            policy_version: the version that made them.
            token_ids: int32 [n], prompt and response at positions 0 to n - 1.
            nbytes: of keys and values.

        Raises:
            OSError: the shared memory is too small, or somebody writes this file.
        """
        described = layout.encode()
        self._head = (len(described), policy_version, len(token_ids), nbytes)
        self._fixed = described + np.ascontiguousarray(token_ids, np.int32).tobytes()
        offset = _payload_offset(len(self._fixed))
        super().__init__(path, offset + nbytes)
        self.file_bytes = offset + nbytes
        self.buffer: NDArray[np.uint8] = np.frombuffer(self.map, np.uint8, offset=offset)  # uint8 [nbytes]

    def commit(self) -> None:
        """Make the file visible."""
        layout_bytes, policy_version, tokens, nbytes = self._head
        head = _HEADER.pack(MAGIC, FORMAT, layout_bytes, policy_version, tokens, nbytes, checksum(self.buffer))
        head += self._fixed
        self.map[: len(head) + _CRC.size] = head + _CRC.pack(zlib.crc32(head))
        super().commit()

    def _close(self) -> None:
        self.buffer = np.empty(0, np.uint8)
        super()._close()


class KvReader:
    """A committed file, mapped read-only. It may be unlinked meanwhile."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            KvRefused: it is not there (any more), is cut off, or its header is damaged.
        """
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size < _HEADER.size + _CRC.size:
                    raise KvRefused(f"{path.name}: too short for a file of KV")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants it writable
        except OSError as error:
            raise KvRefused(f"{path.name}: {os.strerror(error.errno or errno.EIO)}") from error
        self.path = path
        self.file_bytes = len(self._map)
        try:
            self._read_header()
        except KvRefused:
            self._map.close()
            raise

    def _read_header(self) -> None:
        name, mapped = self.path.name, self._map
        magic, file_format, layout_bytes, self.policy_version, tokens, nbytes, self._checksum = _HEADER.unpack_from(
            mapped
        )
        if magic != MAGIC or file_format != FORMAT:
            raise KvRefused(f"{name}: not a file of KV in format {FORMAT}")
        fixed = layout_bytes + 4 * tokens
        offset = _payload_offset(fixed)
        if offset + nbytes != len(mapped):
            raise KvRefused(f"{name}: cut off ({len(mapped)} bytes, {offset + nbytes} expected)")
        end = _HEADER.size + fixed
        if _CRC.unpack_from(mapped, end)[0] != zlib.crc32(mapped[:end]):
            raise KvRefused(f"{name}: damaged header")
        self.layout = mapped[_HEADER.size : _HEADER.size + layout_bytes].decode()
        # int32 [n], a copy
        self.token_ids = np.frombuffer(mapped[_HEADER.size + layout_bytes : end], np.int32)
        self._payload: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8, count=nbytes, offset=offset)

    def check(self, *, layout: str, policy_version: int, context: NDArray[np.int32], least: int) -> int:
        """How many positions of this context (int32 [n]) the file holds the KV of; at most n - 1, as the last is computed.

        Raises:
            KvRefused: another model, engine or version; or fewer positions than `least`.
        """
        name = self.path.name
        if self.layout != layout:
            raise KvRefused(f"{name}: laid out as {self.layout!r}, this engine has {layout!r}")
        if self.policy_version != policy_version:
            raise KvRefused(f"{name}: of version {self.policy_version}, version {policy_version} is served")
        count = min(len(self.token_ids), len(context) - 1)
        same = self.token_ids[:count] == context[:count]
        held = count if bool(same.all()) else int(np.argmin(same))
        if held < least:
            raise KvRefused(f"{name}: holds {held} positions of a context of {len(context)} tokens, {least} needed")
        return held

    def payload(self) -> NDArray[np.uint8]:
        """Keys and values as they were written, uint8 [nbytes]. Raises KvRefused if they are damaged."""
        if checksum(self._payload) != self._checksum:
            raise KvRefused(f"{self.path.name}: damaged")
        return self._payload

    def close(self) -> None:
        """Let go of the mapping."""
        self._payload = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _payload_offset(fixed_bytes: int) -> int:
    return -(-(_HEADER.size + fixed_bytes + _CRC.size) // ALIGNMENT) * ALIGNMENT

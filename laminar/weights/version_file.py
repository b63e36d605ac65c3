"""The file of one weight version: header, layout (msgpack), then the data region, which starts on a page.

Invariants:
- Memory is reserved (in huge pages where there are any) before it is written to, so that a full /dev/shm is an error message and not a SIGBUS
  in the middle of a copy.
- The file is written under a hidden name and renamed when it is complete; from then on it never changes. Unlinking it
  never disturbs a process that has it mapped.
- A hidden file is locked (flock) as long as its writer lives, whichever container that is in: one that is not locked is
  a dead writer's, and may go.

Imports no torch: relays use it too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from laminar.errors import UserError
from laminar.weights.layout import WeightLayout
from laminar.weights.mapping import map_file, reserve

MAGIC = b"LAMINARW"
FORMAT = 2
PAGE_BYTES = 4096
_RESERVED_BYTES = 16 << 20  # at a time: whole huge pages, some milliseconds

# magic, format, policy version, layout bytes, data offset, data bytes; a CRC-32 of header and layout follows the layout
_HEADER = struct.Struct("<8sIIQQQ")
_CRC = struct.Struct("<I")


class HiddenFile:
    """Mapped memory for a version of a given layout, under a name that no reader looks at; to be reserved before it is written."""

    def __init__(self, path: Path, layout: WeightLayout) -> None:
        """Create the file in place of one that a dead writer left.

        Raises:
            FileExistsError: a living writer has this file.
            UserError: the shared memory is too small.
        """
        self.path = path
        self.layout = layout
        self._data_offset = len(_header(0, layout))
        self._nbytes = self._data_offset + layout.total_bytes
        self._reserved = self._touched = 0  # bytes from the start of the file
        remove_if_dead(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstatvfs(self._fd)
            self._present = status.f_bavail * status.f_frsize
            if self._present < self._nbytes:
                raise self._too_small()
            os.ftruncate(self._fd, self._nbytes)
            self._map = map_file(self._fd, self._nbytes, "write")
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(self._fd)
            raise
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, offset=self._data_offset)  # [total_bytes]

    def reserve(self, nbytes: int) -> bool:
        """Allocate the next bytes of the file; false if none were left.

        Raises:
            UserError: the shared memory is too small.
        """
        start = self._reserved
        stop = min(start + nbytes, self._nbytes)
        try:
            reserve(self._fd, self._map, start, stop)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise self._too_small() from error
        self._reserved = stop
        return stop > start

    def reserve_data(self, stop: int) -> None:
        """Allocate the file up to byte `stop` of the data region, and some more in advance; see `reserve`."""
        missing = self._data_offset + stop - self._reserved
        if missing > 0:
            self.reserve(-(-missing // _RESERVED_BYTES) * _RESERVED_BYTES)

    def touch(self) -> None:
        """Have the kernel put the pages of all that is reserved in place (zeroed), so that writing costs a memory copy and no more.

        Without huge pages this takes about as long as writing would. Does not hold the interpreter's lock.
        """
        memory = np.frombuffer(self._map, np.uint8)
        memory[self._touched : self._reserved : PAGE_BYTES] = 0
        self._touched = self._reserved

    def rename(self, path: Path) -> None:
        """Change the file's name; a file that has it already goes."""
        os.rename(self.path, path)
        self.path = path

    def write_header(self, policy_version: int) -> None:
        """Say what the file is."""
        self._map[: self._data_offset] = _header(policy_version, self.layout)

    def unmap(self) -> None:
        """Let go of the memory; views of the buffer keep it until they end."""
        self.buffer = np.empty(0, np.uint8)
        self._map = memoryview(b"")
        os.close(self._fd)

    def _too_small(self) -> UserError:
        return UserError(
            f"shared memory too small: {self.path.parent} has {self._present} bytes free, one weight version needs "
            f"{self._nbytes} bytes; enlarge it (mount -o remount,size=... /dev/shm, or --shm-size for a container) or keep "
            "fewer versions"
        )


class VersionWriter:
    """One version being written: its data region is the mapping of the file itself."""

    def __init__(
        self, policy_version: int, hidden: HiddenFile, final: Path, on_end: Callable[[HiddenFile], None]
    ) -> None:
        """Use `WeightStore.begin`; `on_end` takes the mapping back, to be unmapped when there is time for it."""
        self.policy_version = policy_version
        self.layout = hidden.layout
        self.path = final  # where the version lies after commit
        self._hidden = hidden
        self._on_end = on_end
        self._open = True

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The data region, uint8 [total_bytes]; empty after commit or discard."""
        return self._hidden.buffer if self._open else np.empty(0, np.uint8)

    def reserve(self, stop: int) -> None:
        """Have memory for the data region up to this byte; nothing must be written to the buffer beyond what is reserved.

        Raises:
            UserError: the shared memory is too small.
        """
        self._hidden.reserve_data(stop)

    def commit(self) -> Path:
        """Make the version visible and return its path. Views of the buffer must not be written to afterwards."""
        if not self._open:
            raise RuntimeError(f"cannot commit version {self.policy_version}: its writer has ended")
        self._open = False
        self._hidden.write_header(self.policy_version)
        self._hidden.rename(self.path)
        self._on_end(self._hidden)
        return self.path

    def discard(self) -> None:
        """Give the version up: its memory is freed as soon as nobody maps it. Harmless after commit or discard."""
        if self._open:
            self._open = False
            self._hidden.path.unlink(missing_ok=True)
            self._hidden.unmap()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Discard what was not committed."""
        self.discard()


class VersionReader:
    """A committed version, mapped read-only.

    Views of `buffer` stay valid after `close` and after the file was unlinked: the memory lives as long as they do.
    """

    def __init__(self, path: Path | str, *, copy_on_write: bool = False) -> None:
        """Map the file at `path`.

        Args:
            path: a committed version file.
            copy_on_write: make `buffer` writable; writes go to private copies of pages, never to the file.

        Raises:
            FileNotFoundError: no such version (any more).
            ValueError: not a weight file, or a damaged one; names the file.
        """
        self.path = Path(path)
        with open(self.path, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes < _HEADER.size + _CRC.size:
                raise ValueError(f"{self.path}: not a weight file (too short)")
            mapping = map_file(file.fileno(), nbytes, "private" if copy_on_write else "read")
        self.policy_version, self.layout, data_offset = _read_header(mapping, self.path)
        self.buffer: NDArray[np.uint8] = np.frombuffer(  # uint8 [total_bytes]
            mapping, np.uint8, count=self.layout.total_bytes, offset=data_offset
        )

    def close(self) -> None:
        """Let go of the mapping; it is unmapped when the last view of the buffer is gone."""
        self.buffer = np.empty(0, np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def remove_if_dead(path: Path) -> bool:
    """Unlink a hidden file whose writer has ended; False if there is none, or its writer lives."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _header(policy_version: int, layout: WeightLayout) -> bytes:
    """Everything before the data region, padded to a whole number of pages."""
    packed = layout.to_bytes()
    used = _HEADER.size + len(packed) + _CRC.size
    data_offset = -(-used // PAGE_BYTES) * PAGE_BYTES
    head = _HEADER.pack(MAGIC, FORMAT, policy_version, len(packed), data_offset, layout.total_bytes) + packed
    return (head + _CRC.pack(zlib.crc32(head))).ljust(data_offset, b"\0")


def _read_header(mapping: memoryview, path: Path) -> tuple[int, WeightLayout, int]:
    """(policy version, layout, data offset). Raises ValueError naming the file."""
    magic, file_format, policy_version, layout_bytes, data_offset, total_bytes = _HEADER.unpack_from(mapping)
    if magic != MAGIC:
        raise ValueError(f"{path}: not a weight file (starts with {magic!r})")
    if file_format != FORMAT:
        raise ValueError(f"{path}: weight file format {file_format}; this version reads format {FORMAT}")
    end = _HEADER.size + layout_bytes
    if end + _CRC.size > data_offset or data_offset + total_bytes > len(mapping):
        raise ValueError(f"{path}: weight file cut off ({len(mapping)} bytes, {data_offset + total_bytes} expected)")
    if _CRC.unpack_from(mapping, end)[0] != zlib.crc32(mapping[:end]):
        raise ValueError(f"{path}: weight file with a damaged header")
    layout = WeightLayout.from_bytes(bytes(mapping[_HEADER.size : end]))
    if layout.total_bytes != total_bytes:
        raise ValueError(f"{path}: weight file with {total_bytes} data bytes, but a layout of {layout.total_bytes}")
    return policy_version, layout, data_offset

"""Files in shared memory, mapped so that they can lie in huge pages (2 MiB on most machines).

Zeroing, mapping, copying and unmapping a version cost several times less CPU in huge pages than in pages of 4 KiB: the kernel does
each of them page by page, Open MPI's copy from another process's memory included. Huge pages are asked for by
MADV_COLLAPSE (Linux 6.1), which needs no privilege and no setting of the host. Where they are not to be had, everything works
with small pages.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path
from typing import Literal

_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_COLLAPSE = 25  # python 3.11 has no name for it
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

Access = Literal["read", "write", "private"]
_MODES: dict[Access, tuple[int, int]] = {
    "read": (mmap.PROT_READ, mmap.MAP_SHARED),
    "write": (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED),
    "private": (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE),  # writes go to copies of pages
}

# Not by the module mmap: it maps at no address of our choice, and holds the interpreter's lock in madvise and munmap.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@functools.cache
def huge_page_bytes() -> int:
    """Size of a huge page of this kernel, 0 if it has none."""
    try:
        return int(_SIZE_FILE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def map_file(fd: int, nbytes: int, access: Access) -> memoryview:
    """The first `nbytes` of a file as bytes, at an address where huge pages fit; `fd` is not needed afterwards.

    Unmapped as soon as the last view of it is gone.

    Raises:
        OSError: the kernel refuses.
    """
    # Only where the address is as far into a huge page as the offset in the file: so room for that is set aside first.
    alignment = max(huge_page_bytes(), mmap.PAGESIZE)
    room = nbytes + alignment
    start = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    protection, flags = _MODES[access]
    try:
        address = _mmap(-(-start // alignment) * alignment, nbytes, protection, flags | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(start, room)
        raise
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, start, room).atexit = False
    view = memoryview(memory).cast("B")
    return view.toreadonly() if access == "read" else view


def reserve(fd: int, mapping: memoryview, start: int, stop: int) -> None:
    """Allocate a part of a file that is mapped for writing, in huge pages as far as there are any.

    Raises:
        OSError: the memory is too small (ENOSPC, ENOMEM).
    """
    huge = huge_page_bytes()
    if huge:
        first, end = -(-start // huge) * huge, stop // huge * huge
        for offset in range(first, end, huge):
            os.posix_fallocate(fd, offset, 1)  # the kernel makes a huge page only where there is a page already
        if first < end:
            address = ctypes.addressof(ctypes.c_uint8.from_buffer(mapping, first))
            _libc.madvise(address, end - first, _MADV_COLLAPSE)  # says no where it cannot: small pages then
    if start < stop:
        os.posix_fallocate(fd, start, stop - start)


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found

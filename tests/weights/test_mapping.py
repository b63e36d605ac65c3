from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import pytest

from laminar.weights import mapping
from laminar.weights.mapping import huge_page_bytes, map_file, reserve

NBYTES = 4 * (2 << 20) + 5000


@pytest.fixture
def file(shared_memory):
    """A file of NBYTES whose memory is not reserved."""
    path = shared_memory / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, NBYTES)
    yield fd
    os.close(fd)


def mapped(fd):
    """Of each mapping of the file in this process, its lines in smaps."""
    inode, found, here = os.fstat(fd).st_ino, [], False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            here = fields[4] == str(inode)
            if here:
                found.append({})
        elif here:
            found[-1][fields[0].rstrip(":")] = fields[1]
    return found


def allocated(fd):
    return os.fstat(fd).st_blocks * 512


def has_huge_pages():
    """Whether this kernel makes them when asked to."""
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return release >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text(encoding="ascii")


def test_what_is_written_to_a_mapping_is_in_the_file_and_in_others(file):
    writing, reading = map_file(file, NBYTES, "write"), map_file(file, NBYTES, "read")
    private = map_file(file, NBYTES, "private")
    reserve(file, writing, 0, NBYTES)
    writing[-3:] = b"abc"
    private[:3] = b"xyz"
    assert os.pread(file, 3, NBYTES - 3) == b"abc" == bytes(reading[-3:]) == bytes(private[-3:])
    assert bytes(reading[:3]) == b"\0\0\0" == os.pread(file, 3, 0)
    with pytest.raises(TypeError, match="read-only"):
        reading[0] = 1


def test_a_mapping_lives_as_long_as_a_view_of_it(file):
    whole = map_file(file, NBYTES, "write")
    reserve(file, whole, 0, NBYTES)
    whole[-1] = 9
    view = np.frombuffer(whole, np.uint8)[NBYTES - 10 :]
    del whole
    assert view[-1] == 9
    assert len(mapped(file)) == 1
    del view
    assert not mapped(file)


def test_every_byte_is_reserved_in_pieces_too(file):
    memory = map_file(file, NBYTES, "write")
    for start in range(0, NBYTES, 3 << 20):
        stop = min(start + (3 << 20), NBYTES)
        reserve(file, memory, start, stop)
        assert allocated(file) >= stop
    reserve(file, memory, NBYTES, NBYTES)


@pytest.mark.skipif(not has_huge_pages(), reason="this kernel makes no huge pages of shared memory")
@pytest.mark.skipif(huge_page_bytes() > 2 << 20, reason="the file of this test is smaller than a huge page")
def test_memory_comes_in_huge_pages_for_readers_too(file):
    memory = map_file(file, NBYTES, "write")
    reserve(file, memory, 0, NBYTES)
    reading = map_file(file, NBYTES, "read")
    assert not any(reading[:: mapping.huge_page_bytes()])  # looked at, so mapped
    assert [int(found["ShmemPmdMapped"]) for found in mapped(file)] == [8192, 8192]  # KiB


def test_without_huge_pages_small_ones_do(file, monkeypatch):
    memory = map_file(file, NBYTES, "write")
    monkeypatch.setattr(mapping, "_MADV_COLLAPSE", 9999)  # a kernel that does not know it
    reserve(file, memory, 0, 4 << 20)
    assert allocated(file) >= 4 << 20
    monkeypatch.setattr(mapping, "huge_page_bytes", lambda: 0)
    reserve(file, memory, 4 << 20, NBYTES)
    assert allocated(file) >= NBYTES
    again = map_file(file, NBYTES, "read")
    memory[-1] = 1
    assert again[-1] == 1
    assert not any(int(found["ShmemPmdMapped"]) for found in mapped(file))


def test_what_cannot_be_mapped_is_an_error_and_leaves_no_address_space_taken():
    nbytes = 1 << 40  # told by its size

    def kept():
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        return [stop - start for start, stop in ends if stop - start >= nbytes]

    before = kept()
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_file(-1, nbytes, "read")
    assert kept() == before

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

from laminar.errors import UserError
from laminar.weights import version_file
from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore
from laminar.weights.version_file import PAGE_BYTES, VersionReader

LAYOUT = WeightLayout.plan([("a", "uint8", (1000,)), ("b", "int64", (3,))])


@pytest.fixture
def store(shared_memory):
    return WeightStore("run", "relay-0", shared_memory)


def commit(store, version, value=1):
    writer = store.begin(version, LAYOUT)
    writer.buffer[:] = value
    return writer.commit()


def test_a_version_is_invisible_until_committed(store):
    writer = store.begin(3, LAYOUT)
    writer.buffer[:] = 7
    assert store.versions() == []
    assert store.newest() is None
    with pytest.raises(FileNotFoundError):
        store.open(3)
    path = writer.commit()
    assert path == store.path(3) == writer.path
    assert store.newest() == 3
    with store.open(3) as reader:
        assert reader.policy_version == 3
        assert reader.layout == LAYOUT
        assert (reader.buffer == 7).all()
        assert reader.buffer.shape == (LAYOUT.total_bytes,)


def test_the_data_region_starts_on_a_page_even_behind_a_long_layout(store):
    layout = WeightLayout.plan([(f"layers.{i}.weight", "uint8", (64,)) for i in range(500)])
    with store.begin(0, layout) as writer:
        writer.buffer[:] = np.arange(layout.total_bytes, dtype=np.uint64).astype(np.uint8)
        path = writer.commit()
    offset = path.stat().st_size - layout.total_bytes
    assert offset > PAGE_BYTES
    assert offset % PAGE_BYTES == 0
    assert np.array_equal(np.fromfile(path, np.uint8)[offset:], VersionReader(path).buffer)


def test_the_buffer_is_the_file_itself(store):
    writer = store.begin(0, LAYOUT)
    partial = next(store.directory.glob(".*.partial"))
    writer.buffer[-5:] = 9
    assert partial.read_bytes().endswith(b"\x09" * 5)
    writer.discard()


def test_only_the_owner_may_read(store):
    path = commit(store, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (store.directory, store.directory.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_discarded_version_leaves_nothing(store):
    with store.begin(0, LAYOUT):
        pass
    assert list(store.directory.iterdir()) == []


def test_a_version_is_never_written_twice(store):
    commit(store, 1)
    with pytest.raises(FileExistsError, match="already in the store"):
        store.begin(1, LAYOUT)


def write_half_and_die(shared_memory):
    """Another process that begins version 1 of the store; its standard output says when it has."""
    code = (
        "import sys; from pathlib import Path; from laminar.weights.layout import WeightLayout\n"
        "from laminar.weights.store import WeightStore\n"
        "store = WeightStore('run', 'relay-0', Path(sys.argv[1]))\n"
        "layout = WeightLayout.plan([('a', 'uint8', (1000,)), ('b', 'int64', (3,))])\n"
        "store.prepare(layout); first = store.begin(1, layout); store.prepare(layout)\n"
        "print('begun', flush=True); sys.stdin.read(); import os; os._exit(1)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, shared_memory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_what_another_process_writes_is_safe_until_it_dies(store, shared_memory):
    commit(store, 0, value=2)
    writer = write_half_and_die(shared_memory)
    try:
        assert writer.stdout.readline() == "begun\n"
        held = {path.name for path in store.directory.iterdir()}
        assert len(held) == 3
        with pytest.raises(FileExistsError, match="version 1 is being written"):
            store.begin(1, LAYOUT)
        store.prepare(LAYOUT)
        commit(store, 2)
        assert store.recover() == []
        assert held < {path.name for path in store.directory.iterdir()}
    finally:
        writer.communicate(timeout=60)
    assert len(store.recover()) == 2
    commit(store, 1, value=4)
    assert (store.open(1).buffer == 4).all()
    assert store.versions() == [0, 1, 2]


def test_a_dead_writers_half_written_file_is_displaced(store, shared_memory):
    write_half_and_die(shared_memory).communicate(timeout=60)
    commit(store, 1, value=4)
    assert (store.open(1).buffer == 4).all()
    store.prepare(LAYOUT)
    assert len(list(store.directory.iterdir())) == 2


def test_what_a_dead_relay_left_is_taken_over_without_what_is_damaged(store):
    for version in range(3):
        commit(store, version)
    store.path(1).write_bytes(b"short")
    os.rename(store.path(0), store.path(7))
    (store.directory / ".version-00000009.weights.partial").write_bytes(b"x")
    said = store.recover()
    assert [any(text in line for line in said) for text in ("too short", "holds version 0", "writer has ended")]
    assert len(said) == 3
    assert [path.name for path in store.directory.iterdir()] == [store.path(2).name]


def test_memory_can_be_taken_while_it_is_being_prepared(store, monkeypatch):
    monkeypatch.setattr("laminar.weights.store._PIECE_BYTES", 4096)
    layout = WeightLayout.plan([("a", "uint8", (10 * 4096,))])
    touch, touched, writers = version_file.HiddenFile.touch, [], []

    def touch_and_begin(hidden):
        touch(hidden)
        touched.append(hidden)
        if len(touched) == 3:
            taking.start()

    def begin():
        writers.append(store.begin(0, layout))
        writers[0].buffer[:] = 7

    taking = threading.Thread(target=begin)
    monkeypatch.setattr(version_file.HiddenFile, "touch", touch_and_begin)
    store.prepare(layout)
    taking.join(10)
    writers[0].commit()
    assert (store.open(0).buffer == 7).all()
    assert len(list(store.directory.iterdir())) == 1


def test_a_writer_ends_once(store):
    writer = store.begin(1, LAYOUT)
    writer.commit()
    assert writer.buffer.size == 0
    writer.discard()
    assert store.versions() == [1]
    with pytest.raises(RuntimeError, match="version 1"):
        writer.commit()


def test_retain_unlinks_old_versions_without_disturbing_readers(store):
    for version in (2, 10, 7):
        commit(store, version, value=version)
    reader = store.open(2)
    view = reader.buffer[:10]
    assert store.retain(2) == [2]
    assert store.versions() == [7, 10]
    assert store.retain(2) == []
    assert (reader.buffer == 2).all()
    reader.close()
    assert (view == 2).all()


def test_a_version_that_is_held_can_be_read_by_other_processes_whatever_retention_does(store):
    commit(store, 1, value=5)
    with store.hold(1) as path:
        commit(store, 2)
        assert store.retain(1) == [1]
        code = (
            "import sys; from laminar.weights.version_file import VersionReader\n"
            "with VersionReader(sys.argv[1]) as reader: print(reader.policy_version, reader.buffer[0])"
        )
        said = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
        assert said.stdout.split() == ["1", "5"]
    assert not os.path.exists(path)
    with pytest.raises(FileNotFoundError), store.hold(1):
        pass


def test_retain_bounds_the_bytes_too_but_never_drops_the_newest(store):
    for version in range(5):
        commit(store, version)
    size = store.path(0).stat().st_size
    assert store.retain(4, 3 * size) == [0, 1]
    assert store.retain(4, 2 * size + size // 2) == [2]
    assert store.retain(4, 1) == [3]
    assert store.retain(4, 1) == []
    assert store.versions() == [4]


def test_readers_cannot_change_a_version(store):
    commit(store, 0, value=5)
    with store.open(0) as reader, pytest.raises(ValueError, match="read-only"):
        reader.buffer[0] = 1
    private = VersionReader(store.path(0), copy_on_write=True)
    private.buffer[0] = 1
    assert store.open(0).buffer[0] == 5


def test_another_process_reads_what_was_written(store, shared_memory):
    commit(store, 4, value=6)
    code = (
        "import sys; from pathlib import Path; from laminar.weights.store import WeightStore\n"
        "store = WeightStore('run', 'relay-0', Path(sys.argv[1]))\n"
        "print(store.newest(), int(store.open(4).buffer.sum()), 'torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, shared_memory], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert out.split() == ["4", str(6 * LAYOUT.total_bytes), "False"]


def test_too_little_shared_memory_is_said_before_anything_is_written(store):
    status = os.statvfs(store.directory)
    present = status.f_bavail * status.f_frsize
    layout = WeightLayout.plan([("huge", "uint8", (present + PAGE_BYTES,))])
    with pytest.raises(UserError, match=rf"shared memory too small: .* needs {present + 2 * PAGE_BYTES} bytes"):
        store.begin(0, layout)
    assert list(store.directory.iterdir()) == []


def test_shared_memory_that_fills_up_meanwhile_is_the_same_error(store, monkeypatch):
    def full(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(version_file.os, "posix_fallocate", full)
    with pytest.raises(UserError, match="shared memory too small"):
        store.begin(0, LAYOUT)
    assert list(store.directory.iterdir()) == []


def test_prepared_memory_is_taken_once_and_only_for_its_layout(store):
    assert store.prepare(LAYOUT)
    assert store.prepare(LAYOUT)
    (prepared,) = store.directory.iterdir()
    inode = prepared.stat().st_ino
    assert store.versions() == []
    assert commit(store, 0, value=3).stat().st_ino == inode
    assert commit(store, 1, value=4).stat().st_ino != inode
    assert (store.open(0).buffer == 3).all()
    store.prepare(WeightLayout.plan([("other", "uint8", (5,))]))
    assert commit(store, 2).stat().st_size > PAGE_BYTES + 5 * 64
    assert sorted(path.name for path in store.directory.iterdir()) == [store.path(v).name for v in range(3)]


def test_what_a_dead_writer_had_prepared_is_freed(store):
    (store.directory / ".prepared-1.partial").write_bytes(b"x")
    store.prepare(LAYOUT)
    assert [path.name for path in store.directory.iterdir()] == [f".prepared-{os.getpid()}.partial"]


def test_padding_is_zero_in_prepared_memory_too(store):
    layout = WeightLayout.plan([("a", "uint8", (1,)), ("b", "uint8", (1,))])
    for version in range(2):
        with store.begin(version, layout) as writer:
            writer.buffer[0] = writer.buffer[64] = 1
            writer.commit()
        assert store.open(version).buffer.sum() == 2
        store.prepare(layout)


def test_too_little_memory_to_prepare_is_no_error(store):
    status = os.statvfs(store.directory)
    assert not store.prepare(WeightLayout.plan([("huge", "uint8", (status.f_bavail * status.f_frsize,))]))
    assert list(store.directory.iterdir()) == []


def test_damaged_files_are_named(store):
    path = commit(store, 0)
    good = path.read_bytes()
    for data, message in [
        (b"short", "too short"),
        (b"X" + good[1:], "not a weight file"),
        (good[:8] + b"\x09" + good[9:], "format 9"),
        (good[:60] + b"\xff" + good[61:], "damaged header"),
        (good[:-100], "cut off"),
    ]:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message) as error:
            store.open(0)
        assert str(path) in str(error.value)


def test_remove_takes_unfinished_versions_too_and_may_be_repeated(store):
    commit(store, 0)
    reader = store.open(0)
    store.begin(1, LAYOUT)
    store.remove()
    store.remove()
    assert not store.directory.exists()
    assert (reader.buffer == 1).all()

"""The file that KV travels in, and the folder that it lies in."""

import numpy as np
import pytest

from laminar.workers.rollout.kv_file import HiddenKvFile, KvReader, KvRefused, KvWriter, shard_path
from laminar.workers.rollout.kv_folder import KvFolder, export_name
from tests.workers.rollout.kv_files import LAYOUT, write_kv


def context(count, start=0):
    return np.arange(start, start + count, dtype=np.int32)


def test_what_was_written_is_read_back(tmp_path):
    payload = write_kv(tmp_path / "kv", tokens=10)
    with KvReader(tmp_path / "kv.0") as reader:
        assert (reader.layout, reader.policy_version) == (LAYOUT, 3)
        np.testing.assert_array_equal(reader.token_ids, context(10))
        np.testing.assert_array_equal(reader.payload(), payload)
        assert reader.file_bytes == (tmp_path / "kv.0").stat().st_size


@pytest.mark.parametrize(
    ("tokens", "held"),
    [
        (context(11), 10),
        (context(10), 9),  # the last position of a context is always computed
        (context(30), 10),
        (np.concatenate([context(4), context(6, start=50)]), 4),
        (context(5, start=7), 0),
    ],
)
def test_it_holds_a_prefix_of_the_context(tmp_path, tokens, held):
    write_kv(tmp_path / "kv", tokens=10)
    with KvReader(tmp_path / "kv.0") as reader:
        assert reader.check(layout=LAYOUT, policy_version=3, context=tokens, least=0) == held
        with pytest.raises(KvRefused, match=f"holds {held} positions"):
            reader.check(layout=LAYOUT, policy_version=3, context=tokens, least=held + 1)


def test_another_version_or_layout_is_refused(tmp_path):
    write_kv(tmp_path / "kv")
    with KvReader(tmp_path / "kv.0") as reader:
        with pytest.raises(KvRefused, match="of version 3, version 4 is served"):
            reader.check(layout=LAYOUT, policy_version=4, context=context(11), least=1)
        with pytest.raises(KvRefused, match="this engine has 'another'"):
            reader.check(layout="another", policy_version=3, context=context(11), least=1)


def test_every_damaged_byte_and_every_cut_is_noticed(tmp_path):
    write_kv(tmp_path / "kv", nbytes=64)
    path = tmp_path / "kv.0"
    good = path.read_bytes()
    padding = set(range(len(good) - 64 - len(good) % 64, len(good) - 64))
    unnoticed = []
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1
        path.write_bytes(bad)
        try:
            with KvReader(path) as reader:
                reader.payload()
            unnoticed.append(position)
        except KvRefused:
            continue
    assert len(unnoticed) < 64 and bytes(good[k] for k in unnoticed) == bytes(len(unnoticed)), padding
    for length in (0, 10, 60, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(KvRefused):
            KvReader(path)
    path.unlink()
    with pytest.raises(KvRefused, match="No such file"):
        KvReader(path)


def test_a_file_that_is_not_committed_is_never_seen(tmp_path):
    def writer():
        return KvWriter(
            shard_path(tmp_path / "kv", 0), layout=LAYOUT, policy_version=1, token_ids=context(3), nbytes=10
        )

    with writer():
        assert [path.name for path in tmp_path.iterdir()] == [".kv.0.partial"]
        with pytest.raises(FileExistsError):
            writer()
    assert not list(tmp_path.iterdir())


def test_a_full_memory_is_an_error_that_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match=r"."):
        HiddenKvFile(tmp_path / "kv.0", 1 << 60)
    assert not list(tmp_path.iterdir())


def test_a_folder_removes_what_is_named_and_no_more(tmp_path):
    folder = KvFolder("r", tmp_path)
    names = [export_name(f"rollout-{k}", "7.1", lease) for k in (1, 11) for lease in (1, 12)]
    for name in names:
        for shard in (0, 1):
            write_kv(folder.path(name), shard=shard)
    assert all(folder.holds(name) for name in names)
    folder.remove(names[0])
    folder.remove("never there")
    assert [folder.holds(name) for name in names] == [False, True, True, True]
    left = HiddenKvFile(folder.path("rollout-2~1.1~1.0"), 10)  # its writer lives
    (folder.directory / ".rollout-3~1.1~1.0.partial").write_bytes(b"its writer has died")
    folder.remove_all_of("rollout-1")
    assert [folder.holds(name) for name in names] == [False, False, True, True]
    assert sorted(path.name for path in folder.directory.iterdir() if path.name.startswith(".")) == [
        ".rollout-2~1.1~1.0.partial"
    ]
    left.__exit__(None, None, None)


@pytest.mark.parametrize("name", ["", "../other", "a/b", ".hidden"])
def test_a_name_is_a_plain_file_name(tmp_path, name):
    with pytest.raises(ValueError, match="no name of exported KV"):
        KvFolder("r", tmp_path).path(name)

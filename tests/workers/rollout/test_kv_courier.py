"""Exports found in this host's memory, or fetched from another host's; two couriers stand for two rollouts."""

import asyncio
import dataclasses
import socket

import pytest

from laminar.workers.rollout.engine import KvExported
from laminar.workers.rollout.kv_courier import KvCourier
from laminar.workers.rollout.kv_folder import KvFolder
from laminar.workers.rollout.kv_hop import CHUNK_BYTES
from tests.workers.rollout.kv_files import write_kv

KEY = b"k" * 32


class Hosts:
    """A rollout that exports and one that imports, each with its own memory, or both with one."""

    def __init__(self, tmp_path, *, apart, key=KEY):
        self.source_folder = KvFolder("r", tmp_path / "one")
        self.target_folder = KvFolder("r", tmp_path / ("other" if apart else "one"))
        self.source = KvCourier("rollout-0", self.source_folder, "127.0.0.1", KEY)
        self.target = KvCourier("rollout-1", self.target_folder, "127.0.0.1", key)

    def export(self, trajectory_id="7.1", *, shards=1, nbytes=1000):
        path = self.source.export_path(trajectory_id, 1)
        self.written = [write_kv(path, shard=shard, nbytes=nbytes).tobytes() for shard in range(shards)]
        return self.source.exported(
            trajectory_id, 1, 3, KvExported(tokens=10, nbytes=nbytes * shards, shards=shards, seconds=0.0)
        )

    def files(self):
        return [sorted(path.name for path in folder.directory.iterdir()) for folder in self.folders]

    @property
    def folders(self):
        return self.source_folder, self.target_folder

    async def close(self):
        await self.source.close()
        await self.target.close()


@pytest.fixture
def bases(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    return tmp_path


async def test_one_host_imports_the_very_file(bases):
    hosts = Hosts(bases, apart=False)
    reference = hosts.export()
    path, error = await hosts.target.bring(reference, 2)
    assert path == hosts.source_folder.path(reference.name) and not error
    hosts.target.drop(path.name)
    assert hosts.files() == [[], []]
    path, error = await hosts.target.bring(reference, 3)  # it is gone
    assert path is None and "could not be fetched" in error
    await hosts.close()


@pytest.mark.parametrize("shards", [1, 3])
async def test_another_host_gets_the_same_bytes_and_the_exporter_keeps_none(bases, shards):
    hosts = Hosts(bases, apart=True)
    reference = hosts.export(shards=shards, nbytes=2 * CHUNK_BYTES + 77)
    path, error = await hosts.target.bring(reference, 2)
    assert not error
    for shard, payload in enumerate(hosts.written):
        content = path.with_name(f"{path.name}.{shard}").read_bytes()
        assert content.endswith(payload)
    assert path.name == "rollout-1~7.1~2"
    await hosts.source.close()  # waits for its end of the hop
    assert hosts.files()[0] == []
    hosts.target.drop(path.name)
    assert hosts.files() == [[], []]
    await hosts.target.close()


async def test_many_importers_at_once_each_get_theirs(bases):
    hosts = Hosts(bases, apart=True)
    references = [hosts.export(f"7.{member}", nbytes=1000 + member) for member in range(6)]
    brought = await asyncio.gather(*[hosts.target.bring(reference, 2) for reference in reversed(references)])
    sizes = [path.with_name(f"{path.name}.0").stat().st_size for path, _ in reversed(brought)]
    assert [size - sizes[0] for size in sizes] == [0, 1, 2, 3, 4, 5]
    await hosts.close()
    assert hosts.files() == [[], []]


async def test_who_does_not_know_the_key_gets_nothing(bases):
    hosts = Hosts(bases, apart=True, key=b"x" * 32)
    reference = hosts.export()
    path, error = await hosts.target.bring(reference, 2)
    assert path is None and "could not be fetched" in error
    assert hosts.files() == [[f"{reference.name}.0"], []]
    await hosts.close()


async def test_an_export_that_was_dropped_or_whose_host_is_gone_cannot_be_had(bases):
    hosts = Hosts(bases, apart=True)
    reference = hosts.export()
    hosts.source.drop(reference.name)
    path, error = await hosts.target.bring(reference, 2)
    assert path is None and reference.name in error
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = dataclasses.replace(hosts.export("7.2"), address=f"127.0.0.1:{free.getsockname()[1]}")
        path, error = await hosts.target.bring(nobody, 2)
    assert path is None and "could not be fetched" in error
    await hosts.close()
    assert hosts.files() == [[], []]


async def test_a_file_that_vanishes_under_way_leaves_nothing_at_the_importer(bases):
    hosts = Hosts(bases, apart=True)
    reference = hosts.export()
    hosts.source_folder.remove(reference.name)
    path, error = await hosts.target.bring(reference, 2)
    assert path is None and "could not be fetched" in error
    await hosts.close()
    assert hosts.files() == [[], []]


async def test_a_rollout_that_starts_removes_what_its_predecessor_left(bases):
    folder = KvFolder("r", bases / "one")
    write_kv(folder.path("rollout-0~7.1~1"))
    write_kv(folder.path("rollout-1~7.2~1"))
    courier = KvCourier("rollout-0", folder, "127.0.0.1", KEY)
    assert [path.name for path in folder.directory.iterdir()] == ["rollout-1~7.2~1.0"]
    courier.drop_all_of("rollout-1")
    assert not list(folder.directory.iterdir())
    await courier.close()

from __future__ import annotations

import pytest

from laminar.config import machine
from laminar.config.load import load_config
from laminar.config.store_room import check_store_room, kept_versions, version_bytes
from laminar.errors import UserError
from laminar.weights.layout import WeightLayout
from tests.config.conftest import write_safetensors

MIB = 1 << 20


def test_version_bytes_are_those_of_the_layout(config_file, model_folder):
    shapes = {"a.weight": [3, 5], "b.weight": [7], "c.scalar": [], "d.empty": [0, 4], "e.weight": [16, 2]}
    write_safetensors(model_folder / "model.safetensors", shapes | {"lm_head.weight": [3, 5]})
    for dtype in ("float32", "bfloat16"):
        layout = WeightLayout.plan((name, dtype, shape) for name, shape in shapes.items())
        assert version_bytes(load_config(config_file, [f"model.dtype={dtype}"])) == layout.total_bytes


def test_version_bytes_of_what_cannot_be_read(config_file, model_folder):
    assert version_bytes(load_config(config_file, ["model.path=models/none"])) == 0
    (model_folder / "model.safetensors").write_bytes(b"\xff" * 20)
    assert version_bytes(load_config(config_file)) == 0


@pytest.mark.parametrize(
    ("nbytes", "versions", "mib", "kept"),
    [
        (MIB, 2, None, 2),
        (MIB, 2, 10, 2),
        (MIB, 9, 3, 3),
        (MIB + 1, 9, 3, 2),
        (0, 9, 3, 9),  # size not known
        (5 * MIB, 9, 3, 1),  # refused before; a relay that has started keeps the newest all the same
    ],
)
def test_versions_that_are_kept(nbytes, versions, mib, kept):
    assert kept_versions(nbytes, versions, mib) == kept


def test_a_relay_looks_at_its_own_host(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "free_shared_memory", {tmp_path: 3 * MIB - 1}.__getitem__)
    with pytest.raises(UserError) as caught:
        check_store_room(tmp_path, MIB, 2, None)
    message = str(caught.value)
    assert f"relay.keep_versions: 2: 2 and one that arrives, of {MIB} bytes each, need {3 * MIB} bytes" in message
    assert f"{tmp_path} has {3 * MIB - 1};" in message
    assert "relay.count" not in message
    check_store_room(tmp_path, MIB, 2, 1)  # the bound leaves one, and the one that arrives
    with pytest.raises(UserError, match=r"relay\.keep_versions: 3 \(bounded by relay\.keep_mib: 2\): 2 and one"):
        check_store_room(tmp_path, MIB, 3, 2)
    check_store_room(tmp_path, 0, 100, None)  # not known


def test_versions_of_an_earlier_life_count_as_room(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "free_shared_memory", lambda directory: 2 * MIB)
    (tmp_path / "version-00000001.weights").write_bytes(b"\1" * MIB)
    check_store_room(tmp_path, MIB, 2, None)


def test_a_bound_below_one_version(tmp_path):
    with pytest.raises(UserError, match=r"relay\.keep_mib: 1; expected at least 2"):
        check_store_room(tmp_path, MIB + 1, 2, 1)

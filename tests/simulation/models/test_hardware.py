from __future__ import annotations

import pytest

from laminar.errors import UserError
from laminar.simulation.models.hardware import GPUS, gpu


def test_every_preset_is_found_by_its_name():
    assert [gpu(name).name for name in GPUS] == ["H100", "H800", "H200", "A100-80GB"]


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="'B300' is not known; expected one of H100, H800, H200, A100-80GB"):
        gpu("B300")


def test_h800_is_an_h100_with_a_slower_nvlink():
    h800, h100 = gpu("H800"), gpu("H100")
    assert h800.nvlink_bandwidth == 400e9 < h100.nvlink_bandwidth
    assert (h800.peak_flops, h800.memory_bandwidth, h800.memory_bytes) == (
        h100.peak_flops,
        h100.memory_bandwidth,
        h100.memory_bytes,
    )

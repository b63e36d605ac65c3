"""The chain over a real mpirun world."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from laminar.weights.checksum import checksum

DRIVER = Path(__file__).with_name("chain_driver.py")
MPIRUN = Path(sys.executable).with_name("mpirun")
NBYTES = 6 * (1 << 20) + 64

pytestmark = pytest.mark.timeout(180)


def run_world(size, base, **options):
    """Run the driver on `size` ranks; what they said, by (rank, version). Checks that nothing is left behind."""
    mpi_directory = base / "mpi"
    mpi_directory.mkdir()
    command = [MPIRUN, "--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    command += ["--prtemca", "prte_tmpdir_base", mpi_directory, "--mca", "btl_sm_backing_directory", mpi_directory]
    command += ["-n", str(size), sys.executable, DRIVER]
    command.append(json.dumps({"base": str(base), "nbytes": NBYTES, "chunk_bytes": 1 << 20} | options))
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = process.communicate(timeout=120)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert process.returncode == 0, err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # every process of the group is gone
    left = [path.name for path in mpi_directory.iterdir()]
    assert all("dies" in options and name.startswith("sm_segment.") for name in left), left
    said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {(line["rank"], line["version"]): line for line in said}


def order(version, chain, epoch=None, deadline_s=60.0):
    return {"policy_version": version, "chain": chain, "epoch": epoch or version, "deadline_s": deadline_s}


def expected(version):
    return checksum(np.random.default_rng(version).integers(0, 256, NBYTES, np.uint8))


def test_two_relays_hold_the_same_bytes(shared_memory):
    said = run_world(2, shared_memory, orders=[order(1, [0, 1])])
    for rank in range(2):
        line = said[rank, 1]
        assert line["error"] is None
        assert line["stored"] == [NBYTES, 7]
        assert line["checksums"] == {"1": expected(1)}


def test_three_relays_several_versions_any_order_and_retention(shared_memory):
    chains = {1: [0, 1, 2], 2: [0, 2, 1], 3: [2, 0, 1], 4: [1, 0]}
    said = run_world(3, shared_memory, keep=2, orders=[order(v, c) for v, c in chains.items()])
    assert len(said) == 12
    for (rank, version), line in said.items():
        assert line["error"] is None
        assert line["stored"] == ([NBYTES, 7] if rank in chains[version] else None)
        assert line["checksums"] == {str(held): expected(held) for held in line["versions"]}
    assert said[0, 4]["versions"] == said[1, 4]["versions"] == [3, 4]
    assert said[2, 4]["versions"] == [2, 3]


def test_a_damaged_chunk_is_noticed_and_the_next_broadcast_works(shared_memory):
    said = run_world(
        2,
        shared_memory,
        damage=2 + 2 * 4 + 1,  # after header and layout: the bytes of chunk 4
        orders=[order(1, [0, 1], deadline_s=1.0), order(2, [0, 1])],
    )
    assert "TransferError: version 1: chunk 4 of 7 from relay 0 is damaged" in said[1, 1]["error"]
    assert said[1, 1]["versions"] == []
    assert said[1, 1]["stored"] is None
    assert said[0, 1]["versions"] == [1]
    assert "within 1 s: relay 1 has taken" in said[0, 1]["error"]
    assert said[1, 2]["error"] is None
    assert said[1, 2]["checksums"] == {"2": expected(2)}


def test_a_relay_that_does_not_answer_is_named(shared_memory):
    said = run_world(3, shared_memory, absent=[1], orders=[order(1, [0, 1, 2], deadline_s=0.5), order(2, [0, 2])])
    assert "not carried within 0.5 s: relay 1 has taken 0 of 7 chunks" in said[0, 1]["error"]
    assert "not carried within 0.5 s: relay 1 has sent 0 of ? chunks" in said[2, 1]["error"]
    assert said[2, 2]["error"] is None
    assert said[2, 2]["checksums"] == {"2": expected(2)}


def test_a_relay_that_dies_is_named_at_once(shared_memory):
    said = run_world(3, shared_memory, dies=[1], orders=[order(1, [0, 1, 2]), order(2, [0, 2])])
    assert "HopError: relay 1 is lost" in said[0, 1]["error"]
    assert "HopError: relay 1 is lost" in said[2, 1]["error"]
    assert said[2, 2]["checksums"] == {"2": expected(2)}  # the others go on over the same communicator

"""setup.cfg, the lock files and the scripts name the same versions."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

import laminar

ROOT = Path(__file__).parents[2]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    found = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines if line]
    assert all(found), f"not all pinned by ==: {lines}"
    return {normal(match[1]): match[2] for match in found}


def lock(name: str) -> dict[str, str]:
    return pins((ROOT / "requirements" / name).read_text())


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_lock_holds_every_direct_dependency(device):
    direct = pins(SETUP["options"]["install_requires"]) | pins(SETUP["options.extras_require"][device])
    assert direct.items() <= lock(f"{device}.lock").items()


def test_the_dev_lock_adds_to_both_others_and_contradicts_neither():
    dev = lock("dev.lock")
    assert pins(SETUP["options.extras_require"]["dev"]).items() <= dev.items()
    assert not dev.keys() & lock("cpu.lock").keys()
    assert all(lock("gpu.lock").get(name, version) == version for name, version in dev.items())


def test_the_cpu_lock_leaves_out_what_breaks_the_cpu_build():
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & lock("cpu.lock").keys()


@pytest.mark.parametrize("name", ["cpu.lock", "gpu.lock", "dev.lock", "smollm.lock"])
def test_locks_name_each_package_once(name):
    text = (ROOT / "requirements" / name).read_text()
    assert len(lock(name)) == text.count("==")


def test_the_remedies_name_the_pinned_versions():
    cpu = lock("cpu.lock")
    for source in (ROOT / "laminar").rglob("*.py"):
        for name, version in re.findall(r"\b([a-z0-9-]+)==(\d[\w.]*\w)", source.read_text(encoding="utf-8")):
            assert cpu.get(normal(name), version) == version, f"{source}: {name}=={version}"


def test_the_version_is_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", laminar.__version__)
    assert SETUP["metadata"]["version"] == "attr: laminar.__version__"


def test_every_direct_dependency_is_explained():
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    extras = SETUP["options.extras_require"]
    texts = [SETUP["options"]["install_requires"], extras["cpu"], extras["gpu"], extras["dev"]]
    direct = {name: version for text in texts for name, version in pins(text).items()}
    direct |= lock("smollm.lock")
    rows = {normal(name): version for name, version in re.findall(r"^\| `([^`]+)` \| ([\w.]+) \|", page, re.MULTILINE)}
    assert rows == direct

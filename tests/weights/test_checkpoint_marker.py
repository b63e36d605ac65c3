"""The marker of a checkpoint and the files that it tells of."""

import json

import pytest

from laminar.errors import DamagedCheckpoint
from laminar.weights.checkpoint_marker import (
    MARKER,
    CheckpointMarker,
    find_damage,
    read_marker,
    sum_files,
    write_marker,
)
from laminar.weights.checksum import READ_BYTES

CONTENTS = {"trainer/.metadata": b"", "trainer/__0_0.distcp": bytes(range(256)) * (READ_BYTES // 100), "a.json": b"{}"}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of an empty, a large and a small file."""
    (tmp_path / "trainer").mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    files = sum_files(tmp_path, CONTENTS)
    write_marker(tmp_path, CheckpointMarker(step=3, policy_version=5, state='{"run_id": "x"}', files=files))
    return tmp_path


def test_what_was_written_is_read_and_sound(folder):
    marker = read_marker(folder)
    assert (marker.step, marker.policy_version, json.loads(marker.state)) == (3, 5, {"run_id": "x"})
    read = []
    assert find_damage(folder, marker.files, read.append) == ""
    assert sum(read) == marker.nbytes == sum(map(len, CONTENTS.values()))


def test_every_flipped_byte_of_a_file_is_found(folder):
    files = read_marker(folder).files
    large = folder / "trainer/__0_0.distcp"
    for place in (0, 1, READ_BYTES - 1, READ_BYTES, len(CONTENTS["trainer/__0_0.distcp"]) - 1):
        content = bytearray(CONTENTS["trainer/__0_0.distcp"])
        content[place] ^= 1
        large.write_bytes(content)
        assert find_damage(folder, files) == "trainer/__0_0.distcp has another checksum than it was written with"


def test_missing_longer_and_shorter_files_are_named(folder):
    files = read_marker(folder).files
    (folder / "a.json").write_bytes(b"{} ")
    assert find_damage(folder, files) == "a.json has 3 bytes, it was written with 2"
    (folder / "a.json").write_bytes(b"{")
    assert find_damage(folder, files) == "a.json has 1 bytes, it was written with 2"
    (folder / "a.json").unlink()
    assert find_damage(folder, files) == "a.json is missing"
    (folder / "a.json").mkdir()
    assert "a.json" in find_damage(folder, files)


def test_every_flipped_letter_of_the_marker_is_found(folder):
    """The key of the checksums as well: it is not taken for a marker from before there were any."""
    marker = folder / MARKER
    content = marker.read_text()
    for place, letter in enumerate(content):
        if not letter.isspace():
            marker.write_text(content[:place] + chr(ord(letter) ^ 1) + content[place + 1 :])
            with pytest.raises(DamagedCheckpoint, match="complete.json is damaged"):
                read_marker(folder)


def test_a_marker_from_before_there_were_checksums(folder):
    (folder / MARKER).write_text('{"step": 1, "policy_version": 2, "state": null}')
    marker = read_marker(folder)
    assert (marker.step, marker.policy_version, marker.files, marker.nbytes) == (1, 2, None, 0)


def test_a_folder_without_a_marker_is_no_complete_checkpoint(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DamagedCheckpoint, match="is not a complete checkpoint: it has no complete.json"):
            read_marker(folder)

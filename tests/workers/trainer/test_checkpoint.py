from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from laminar.errors import DamagedCheckpoint, UserError
from laminar.protocol.messages import SaveCheckpoint
from laminar.weights.checkpoint_marker import MARKER, find_damage, read_marker
from laminar.workers.trainer import checkpoint as checkpoint_module
from laminar.workers.trainer.checkpoint import load_checkpoint, needed_bytes, save_checkpoint
from tests.tiny_models import make_model
from tests.workers.trainer.batches import largest_difference, parameters_of, random_step


def order(path, step=1):
    return SaveCheckpoint(order=1, step=step, policy_version=step + 10, path=str(path), state='{"cursor": 5}')


def nbytes(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def test_round_trip_and_the_next_step_is_the_same(make_actor, tmp_path):
    actor = make_actor(steps=5, optimizer={"schedule": "linear"})
    actor.train_step(random_step(1))
    saved = save_checkpoint(actor, order(tmp_path / "step-1"))
    assert saved.error == ""
    assert saved.step == 1
    assert saved.nbytes == nbytes(tmp_path / "step-1")
    assert needed_bytes(actor) >= saved.nbytes
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    at_save = parameters_of(actor)
    metrics = actor.train_step(random_step(2))
    after = parameters_of(actor)

    other = make_actor(steps=5, optimizer={"schedule": "linear"})
    assert largest_difference(at_save, parameters_of(other)) > 0
    marker = load_checkpoint(other, tmp_path / "step-1")
    assert (marker.step, marker.policy_version, json.loads(marker.state)) == (1, 11, {"cursor": 5})
    assert largest_difference(at_save, parameters_of(other)) == 0
    again = other.train_step(random_step(2))
    assert largest_difference(after, parameters_of(other)) == 0
    assert again["learning_rate"] == metrics["learning_rate"]
    ours, theirs = actor.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert len(ours) == len(theirs) > 0
    for index, state in ours.items():
        assert all(torch.equal(state[key], theirs[index][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_a_restart_at_any_step_gives_the_same_losses_with_dropout_too(make_actor, tmp_path):
    def dropping_actor():
        actor = make_actor(steps=6, optimizer={"schedule": "cosine", "warmup_steps": 2}, mini_batches=2)
        for module in actor.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
        return actor

    def train(actor, steps):
        return [actor.train_step(random_step(step, seed=step, mini_batches=2)) for step in steps]

    def losses(metrics):
        return [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in metrics]

    undisturbed = dropping_actor()
    expected = losses(train(undisturbed, range(1, 7)))
    for interrupted_at in (1, 3, 5):
        first = dropping_actor()
        train(first, range(1, interrupted_at + 1))
        save_checkpoint(first, order(tmp_path / f"step-{interrupted_at}", step=interrupted_at))
        train(first, [interrupted_at + 1])  # lost
        torch.manual_seed(1234 + interrupted_at)  # whatever a new process starts with
        again = dropping_actor()
        load_checkpoint(again, tmp_path / f"step-{interrupted_at}")
        assert losses(train(again, range(interrupted_at + 1, 7))) == expected[interrupted_at:]
        assert largest_difference(parameters_of(undisturbed), parameters_of(again)) == 0


def test_checkpoint_before_the_first_step_does_not_disturb_training(make_actor, tmp_path):
    saving, plain = make_actor(), make_actor()
    assert save_checkpoint(saving, order(tmp_path / "step-0", step=0)).error == ""
    saving.train_step(random_step())
    plain.train_step(random_step())
    assert largest_difference(parameters_of(saving), parameters_of(plain)) == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huggingface_folder_gives_the_same_logits(make_actor, tmp_path, tied, dtype):
    actor = make_actor(path=make_model(tmp_path / "start", seed=3, tied=tied), dtype=dtype)
    actor.train_step(random_step())
    assert save_checkpoint(actor, order(tmp_path / "saved")).error == ""
    folder = tmp_path / "saved" / "huggingface"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == getattr(torch, dtype)
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert loaded.config.tie_word_embeddings is tied
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("abc").input_ids == actor.tokenizer("abc").input_ids
    token_ids = torch.arange(20)[None]
    with torch.no_grad():
        # Not actor.model.to(bfloat16): that would round the rotary frequencies too.
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=dtype)
        expected.load_state_dict(actor.model.state_dict())
        assert torch.equal(loaded(token_ids).logits, expected(token_ids).logits)


def test_folder_without_marker_is_refused(make_actor, tmp_path):
    actor = make_actor()
    assert save_checkpoint(actor, order(tmp_path / "step-1")).error == ""
    (tmp_path / "step-1" / MARKER).unlink()
    with pytest.raises(UserError, match=r"step-1 is not a complete checkpoint"):
        load_checkpoint(actor, tmp_path / "step-1")
    with pytest.raises(UserError, match=r"nowhere is not a complete checkpoint"):
        load_checkpoint(actor, tmp_path / "nowhere")


def test_checkpoint_of_another_model_is_refused(make_actor, tmp_path):
    assert save_checkpoint(make_actor(), order(tmp_path / "step-1")).error == ""
    other = make_actor(path=make_model(tmp_path / "wide", seed=0, hidden=128))
    with pytest.raises(UserError, match=r"step-1 does not fit the model"):
        load_checkpoint(other, tmp_path / "step-1")


def test_the_marker_has_the_checksum_of_every_other_file(make_actor, tmp_path):
    folder = tmp_path / "step-1"
    assert save_checkpoint(make_actor(), order(folder)).error == ""
    marker = read_marker(folder)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(marker.files) == files - {MARKER}
    assert marker.nbytes == nbytes(folder) - (folder / MARKER).stat().st_size
    assert find_damage(folder, marker.files) == ""


DAMAGE = {
    "missing": lambda file, content: file.unlink(),
    "truncated": lambda file, content: file.write_bytes(content[: len(content) // 2]),
    "flipped": lambda file, content: file.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:]),
}


@pytest.mark.parametrize(
    "damage, said", [("missing", "is missing"), ("truncated", r"has \d+ bytes"), ("flipped", "has another checksum")]
)
@pytest.mark.parametrize("place", ["largest", ".metadata"])
def test_nothing_is_loaded_from_a_damaged_file_and_it_is_named(make_actor, tmp_path, damage, said, place):
    actor = make_actor()
    assert save_checkpoint(actor, order(tmp_path / "step-1")).error == ""
    trainer = tmp_path / "step-1" / "trainer"
    largest = max(trainer.iterdir(), key=lambda path: path.stat().st_size)
    file = largest if place == "largest" else trainer / place
    DAMAGE[damage](file, file.read_bytes())
    actor.train_step(random_step())
    before = parameters_of(actor)
    with pytest.raises(DamagedCheckpoint, match=rf"step-1/trainer/{re.escape(file.name)} {said}"):
        load_checkpoint(actor, tmp_path / "step-1")
    assert largest_difference(before, parameters_of(actor)) == 0


def test_a_checkpoint_from_before_there_were_checksums_is_loaded(make_actor, tmp_path):
    actor, folder = make_actor(), tmp_path / "step-1"
    assert save_checkpoint(actor, order(folder)).error == ""
    content = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps({key: content[key] for key in ("step", "policy_version", "state")}))
    saved = parameters_of(actor)
    actor.train_step(random_step())
    assert load_checkpoint(actor, folder).files is None
    assert largest_difference(saved, parameters_of(actor)) == 0
    file = max((folder / "trainer").iterdir(), key=lambda path: path.stat().st_size)
    DAMAGE["truncated"](file, file.read_bytes())
    with pytest.raises(
        UserError, match=r"step-1 .* is damaged: .* delete the folder to go on from an older checkpoint"
    ):
        load_checkpoint(actor, folder)


def test_too_little_space_is_told_before_anything_is_written(make_actor, tmp_path, monkeypatch):
    actor = make_actor()
    monkeypatch.setattr(checkpoint_module, "free_bytes", lambda folder: 1000)
    saved = save_checkpoint(actor, order(tmp_path / "step-1"))
    assert saved.error == (
        f"checkpoint {tmp_path}/step-1 was not written: not enough space on the disk; "
        f"{needed_bytes(actor)} bytes needed, 1000 bytes free"
    )
    assert saved.nbytes == 0
    assert list(tmp_path.iterdir()) == []
    actor.train_step(random_step())


@pytest.mark.parametrize("place", ["_write_trainer", "_write_huggingface", "_sync_tree", "write_marker"])
def test_failure_at_any_place_leaves_the_older_checkpoint_alone(make_actor, tmp_path, monkeypatch, place):
    actor = make_actor(keep_checkpoints=1)
    assert save_checkpoint(actor, order(tmp_path / "step-1")).error == ""
    before = nbytes(tmp_path)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, place, full)
    saved = save_checkpoint(actor, order(tmp_path / "step-2", step=2))
    assert f"checkpoint {tmp_path}/step-2 was not written: " in saved.error
    assert "[Errno 28] No space left on device; " in saved.error
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert nbytes(tmp_path) == before
    monkeypatch.undo()
    assert save_checkpoint(actor, order(tmp_path / "step-2", step=2)).error == ""
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


@pytest.fixture
def file_size_limit():
    """Sets the largest size of a file that this process may write; a stand-in for a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [100_000, 600_000])  # in the trainer's state; in the Hugging Face export
def test_write_that_fails_in_the_middle_is_a_clear_error(make_actor, tmp_path, file_size_limit, limit):
    actor = make_actor(path=make_model(tmp_path / "start", seed=0, hidden=96, layers=1))
    path = tmp_path / "checkpoints" / "step-1"
    assert save_checkpoint(actor, order(path)).error == ""
    sizes = [file.stat().st_size for file in path.rglob("*")]
    shutil.rmtree(path)
    file_size_limit(limit)
    error = save_checkpoint(actor, order(path)).error
    file_size_limit(resource.RLIM_INFINITY)
    assert max(sizes) > limit
    assert error.startswith(f"checkpoint {path} was not written: ")
    assert "File too large" in error
    assert re.search(r"; \d+ bytes needed, \d+ bytes free$", error)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_only_the_newest_complete_ones_stay(make_actor, tmp_path):
    actor = make_actor(keep_checkpoints=2)
    (tmp_path / "notes").mkdir()  # somebody else's
    for step in (1, 2, 10):
        assert save_checkpoint(actor, order(tmp_path / f"step-{step}", step)).error == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-10", "step-2"]


def test_step_that_is_made_again_replaces_its_checkpoint(make_actor, tmp_path):
    actor = make_actor()
    assert save_checkpoint(actor, order(tmp_path / "step-1")).error == ""
    actor.train_step(random_step())
    assert save_checkpoint(actor, order(tmp_path / "step-1")).error == ""
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    other = make_actor()
    load_checkpoint(other, tmp_path / "step-1")
    assert largest_difference(parameters_of(actor), parameters_of(other)) == 0

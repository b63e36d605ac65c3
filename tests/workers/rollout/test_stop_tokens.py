"""Which tokens end a response."""

import json

import pytest

from laminar.errors import UserError
from laminar.workers.rollout.stop_tokens import stop_token_ids


def write(folder, **files):
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return str(folder)


def test_the_generation_config_comes_first(tmp_path):
    path = write(tmp_path, generation_config={"eos_token_id": [2, 5]}, config={"eos_token_id": 9})
    assert stop_token_ids(path) == (2, 5)


def test_the_model_config_is_the_fallback(tmp_path):
    assert stop_token_ids(write(tmp_path, config={"eos_token_id": 9})) == (9,)
    assert stop_token_ids(write(tmp_path, generation_config={"temperature": 1})) == (9,)


def test_a_model_without_an_end_is_refused(tmp_path):
    with pytest.raises(UserError, match="model.path: .* names no eos_token_id"):
        stop_token_ids(write(tmp_path, config={}))

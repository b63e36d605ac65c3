from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from laminar.errors import UserError
from laminar.workers.trainer.model_loading import load_model, load_tokenizer, named_weights, switch_off_dropout
from tests.tiny_models import make_model


def test_missing_folder():
    with pytest.raises(UserError, match=r"model\.path: no such folder: /nowhere/at/all"):
        load_model("/nowhere/at/all", "model.path")


def test_folder_without_config(tmp_path):
    with pytest.raises(UserError, match=r"model\.path: .* has no config\.json"):
        load_model(str(tmp_path), "model.path")


def test_unknown_model_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(UserError, match=r"model\.path: .*describes no known model"):
        load_model(str(tmp_path), "model.path")


def test_not_causal(tmp_path):
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=10)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.path: .* is not a causal language model.*BertForMaskedLM"):
        load_model(str(tmp_path), "model.path")


def test_missing_weight_is_named(model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of the model's weights \(first: model\.norm\.weight\)"):
        load_model(str(folder), "model.path")


def test_damaged_weights(model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "model.safetensors").write_bytes(b"not a weight file")
    with pytest.raises(UserError, match=r"model\.path: the weights in .* cannot be loaded"):
        load_model(str(folder), "model.path")


def test_missing_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r"model\.path: no tokenizer"):
        load_tokenizer(str(tmp_path), "model.path")


@pytest.mark.parametrize("tied", [True, False])
def test_named_weights_holds_each_tensor_once(tmp_path, tied):
    model = load_model(str(make_model(tmp_path, seed=1, tied=tied)), "model.path")
    weights = named_weights(model)
    assert ("lm_head.weight" in weights) is not tied
    assert set(model.state_dict()) - set(weights) == ({"lm_head.weight"} if tied else set())
    assert sum(tensor.numel() for tensor in weights.values()) == sum(p.numel() for p in model.parameters())


def test_dropout_is_off():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20)).train()
    token_ids = torch.arange(10)[None]
    assert not torch.equal(model(token_ids).logits, model(token_ids).logits)
    switch_off_dropout(model)
    torch.testing.assert_close(model(token_ids).logits, model(token_ids).logits, rtol=0, atol=0)

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from laminar.config.reward_params import RewardModelParams
from laminar.errors import UserError
from laminar.rewards.reward_model import RewardModel
from tests.tiny_models import VOCABULARY, make_model, make_tokenizer

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXTS = [("2 + 3?", "5"), ("Say something long.", "a b c d e f g h i j"), ("?", ""), ("x", "yz")]


def save(path: Path, model: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.apply(model._init_weights)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier that scores the last token, with one output."""
    path = tmp_path_factory.mktemp("decoder")
    tokenizer = make_tokenizer(path)
    config = Qwen3Config(
        **SIZES, intermediate_size=64, num_key_value_heads=1, head_dim=32, num_labels=1, initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return save(path, Qwen3ForSequenceClassification(config))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of three classes."""
    path = tmp_path_factory.mktemp("encoder")
    make_tokenizer(path)
    labels = {0: "bad", 1: "fair", 2: "good"}
    config = BertConfig(**SIZES, intermediate_size=64, num_labels=3, id2label=labels, initializer_range=0.3)
    return save(path, BertForSequenceClassification(config))


def load(path: Path, **keys: Any) -> RewardModel:
    return RewardModel(RewardModelParams.model_validate({"path": str(path), **keys}), key="reward.params")


def score(model: RewardModel, texts: list[tuple[str, str]]) -> list[float]:
    async def all_at_once() -> list[float]:
        return await asyncio.gather(*(model(prompt=prompt, response=response) for prompt, response in texts))

    return asyncio.run(all_at_once())


@pytest.mark.parametrize(("kind", "keys"), [("decoder", {}), ("encoder", {"label": "good"})])
def test_one_forward_pass_gives_the_scores_of_single_ones(
    kind: str, keys: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    together, alone = load(path, **keys), load(path, max_batch=1, **keys)
    scores = score(together, TEXTS)
    assert together.batches == [len(TEXTS)]
    assert scores == pytest.approx(score(alone, TEXTS), abs=1e-5)
    assert alone.batches == [1] * len(TEXTS)
    assert max(scores) - min(scores) > 0.01  # it tells the texts apart


def test_what_the_score_is(decoder: Path, encoder: Path) -> None:
    plain, squashed = score(load(decoder), TEXTS), score(load(decoder, sigmoid=True), TEXTS)
    assert squashed == pytest.approx(torch.tensor(plain).sigmoid().tolist(), abs=1e-6)
    each = [score(load(encoder, label=label), TEXTS[:1])[0] for label in ("bad", "fair", 2)]
    assert sum(each) == pytest.approx(1.0)


def test_long_texts_lose_their_beginning(decoder: Path) -> None:
    long, cut = ("x" * 50, "the end"), ("x" * 10, "the end")
    model = load(decoder, max_tokens=17)
    assert score(model, [long]) == pytest.approx(score(load(decoder), [cut]), abs=1e-5)


def test_folders_and_labels_that_do_not_fit(decoder: Path, encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward\.params\.path: .*missing: no Hugging Face model there"):
        load(tmp_path / "missing")
    with pytest.raises(UserError, match=r"has no weights for .*score.*no trained sequence classifier"):
        load(make_model(tmp_path / "language", seed=0))
    with pytest.raises(UserError, match=r"reward\.params\.label: missing; the model has 3 classes \(bad, fair, good\)"):
        load(encoder)
    with pytest.raises(UserError, match=r"label: best; the model has the classes 0 \(bad\), 1 \(fair\), 2 \(good\)"):
        load(encoder, label="best")
    with pytest.raises(UserError, match=r"label: good; the model has one output"):
        load(decoder, label="good")

"""The reward `reward_model`: the score of a Hugging Face sequence classifier, several trajectories per forward pass.

Invariant: the score of a trajectory does not depend on which others it is batched with, rounding aside (texts are padded on
the right and masked).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from laminar.config.reward_params import RewardModelParams
from laminar.errors import UserError
from laminar.rewards.batching import Batcher

Text = tuple[str, str]  # prompt, response


class RewardModel:
    """A model in memory, and the calls that wait for it."""

    def __init__(self, params: RewardModelParams, *, key: str) -> None:
        """Load model and tokenizer from the folder.

        Args:
            params: the options.
            key: their dotted key, for messages.

        Raises:
            UserError: the folder holds no sequence classifier, or not the label.
        """
        path = params.path
        if not (Path(path) / "config.json").is_file():
            raise UserError(f"{key}.path: {path}: no Hugging Face model there (config.json is missing)")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                path, local_files_only=True, dtype=getattr(torch, params.dtype), output_loading_info=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{key}.path: {path}: cannot be loaded as a sequence classifier: {error}") from error
        if missing := sorted(loading["missing_keys"]):
            raise UserError(
                f"{key}.path: {path} has no weights for {', '.join(missing[:3])}: it is no trained sequence classifier, and they "
                "would be random"
            )
        device = params.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._model = model.to(self._device).eval()
        self._params = params
        self._label = label_index(model.config, params.label, f"{key}.label")
        self._prepare_padding()
        self._batcher: Batcher[Text, float] = Batcher(self.scores, max_batch=params.max_batch)

    async def __call__(self, *, prompt: str, response: str) -> float:
        """The score of one response, computed with others that are waiting."""
        return await self._batcher.call((prompt, response))

    @property
    def batches(self) -> list[int]:
        """Sizes of the newest batches."""
        return self._batcher.batches

    @torch.inference_mode()
    def scores(self, texts: Sequence[Text]) -> list[float]:
        """A score for each prompt and response, in one forward pass."""
        torch.set_num_threads(self._params.threads)
        token_ids = [self._encode(prompt, response) for prompt, response in texts]
        longest = max(len(ids) for ids in token_ids)
        batch = torch.full((len(texts), longest), self._tokenizer.pad_token_id)  # [N, L]
        mask = torch.zeros_like(batch)
        for row, ids in enumerate(token_ids):
            batch[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        logits = self._model(input_ids=batch.to(self._device), attention_mask=mask.to(self._device)).logits.float()
        if self._label is not None:
            return logits.softmax(-1)[:, self._label].tolist()
        outputs = logits[:, 0]
        return (outputs.sigmoid() if self._params.sigmoid else outputs).tolist()

    def _encode(self, prompt: str, response: str) -> list[int]:
        """Token ids of the conversation by the model's own chat template, or of the two texts as a pair."""
        if self._tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            ids: list[int] = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        else:
            ids = self._tokenizer(prompt, response)["input_ids"]
        return ids[-self._params.max_tokens :]

    def _prepare_padding(self) -> None:
        """Models that score the last token find it by the padding's id."""
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id


def label_index(config: Any, label: int | str | None, key: str) -> int | None:
    """Index of the class whose probability is the score; None for a model with one output.

    Raises:
        UserError: no such class, or several outputs and none named.
    """
    count = config.num_labels
    names = {str(name): int(index) for index, name in config.id2label.items()}
    if label is None:
        if count == 1:
            return None
        raise UserError(
            f"{key}: missing; the model has {count} classes ({', '.join(names)}): name the one whose probability is the score"
        )
    if count == 1:
        raise UserError(f"{key}: {label}; the model has one output, which is the score; remove the label")
    if isinstance(label, str) and label in names:
        return names[label]
    if isinstance(label, int) and 0 <= label < count:
        return label
    raise UserError(
        f"{key}: {label}; the model has the classes {', '.join(f'{index} ({name})' for name, index in names.items())}"
    )

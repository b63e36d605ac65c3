"""From an entry to the token ids that the engine reads, and from response ids to text.

Invariant: the ids are made here, once, and by nobody else; the engine and the trainer get ids, never text.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.config.data_schema import DataConfig
from laminar.data.source import Entry
from laminar.errors import UserError

TEMPLATE_KEY = "data.prompt_template"


def render_prompt(template: str, entry: Entry) -> str:
    """The prompt's text: the template over `question` and the entry's metadata fields.

    Raises:
        UserError: a field that the entry does not have, or a template that `str.format` cannot read.
    """
    fields = {**entry.metadata, "question": entry.question}
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        unknown = [name for name in names if name.partition(".")[0].partition("[")[0] not in fields]
        if unknown:
            raise UserError(
                f"{TEMPLATE_KEY}: no field {unknown[0]!r} in an entry of {entry.source}; there are: "
                f"{', '.join(sorted(fields))}. A brace that stands for itself is written twice"
            )
        return template.format(**fields)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(
            f"{TEMPLATE_KEY}: {template!r} cannot be filled in for an entry of {entry.source}: {error}"
        ) from (error)


def load_tokenizer(path: str) -> Any:
    """The model's tokenizer.

    A folder with `tokenizer.json` is read without the auto classes: they import torch, which takes seconds and hundreds
    of MiB in a process that never needs it.

    Raises:
        UserError: the folder is missing or holds no tokenizer.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"model.path: {path} is not a folder; expected a Hugging Face model folder with its tokenizer")
    try:
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"model.path: no tokenizer can be read from {path}: {reason}. "
            "Save it there with tokenizer.save_pretrained (tokenizer.json, tokenizer_config.json)"
        ) from error


class PromptEncoder:
    """Applies the template, the chat template where asked, and the tokenizer."""

    def __init__(self, tokenizer: Any, config: DataConfig) -> None:
        """Take a Hugging Face tokenizer and the section `data`.

        Raises:
            UserError: `chat` with a tokenizer that has no chat template, or a template file that cannot be read.
        """
        self._tokenizer = tokenizer
        self._config = config
        self._chat_template = tokenizer.chat_template
        if config.chat_template is not None:
            self._chat_template = read_chat_template(config.chat_template)
        if config.chat and not self._chat_template:
            raise UserError(
                "data.chat: true, but the model's tokenizer has no chat template. Set data.chat_template to a file with one, "
                f"or data.chat: false and write the turns into {TEMPLATE_KEY}, or take an instruction-tuned model"
            )

    def encode(self, entry: Entry) -> NDArray[np.int32]:
        """Token ids of the prompt, int32 [P] with P > 0.

        Raises:
            UserError: the template does not fit the entry, or nothing is left of the prompt.
        """
        text = render_prompt(self._config.prompt_template, entry)
        if self._config.chat:
            ids = self._apply_chat_template(self._messages(text, entry))
        elif entry.history:
            raise UserError(
                f"data.chat: false, but an entry of {entry.source} is a conversation of {len(entry.history) + 1} messages; "
                "set it to true"
            )
        else:
            ids = self._tokenizer.encode(text)
        if not ids:
            raise UserError(
                f"{TEMPLATE_KEY}: the prompt {text[:80]!r} of {entry.source} has no tokens; expected at least one"
            )
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of a response [T], without special tokens and otherwise as it was generated."""
        text: str = self._tokenizer.decode(
            [int(token) for token in token_ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _messages(self, text: str, entry: Entry) -> list[dict[str, str]]:
        messages = [{"role": message.role, "content": message.content} for message in entry.history]
        if self._config.system_prompt is not None:
            if messages and messages[0]["role"] == "system":
                raise UserError(
                    f"data.system_prompt: set, but an entry of {entry.source} has a system message of its own; remove one"
                )
            messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        return [*messages, {"role": "user", "content": text}]

    def _apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._chat_template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **self._config.chat_template_params,
            )
        except Exception as error:  # a template raises what it likes, by raise_exception too
            key = "data.chat" if self._config.chat_template is None else "data.chat_template"
            raise UserError(f"{key}: the chat template cannot be applied: {type(error).__name__}: {error}") from error
        return ids


def read_chat_template(path: str) -> str:
    """The text of `data.chat_template`.

    Raises:
        UserError: there is no such file, or no text in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"data.chat_template: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"data.chat_template: {path} is not UTF-8 text") from error
    if not text.strip():
        raise UserError(f"data.chat_template: {path} is empty")
    return text

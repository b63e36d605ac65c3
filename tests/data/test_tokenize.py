from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from laminar.config.data_schema import DataConfig
from laminar.data.source import Entry, Message
from laminar.data.tokenize import PromptEncoder, load_tokenizer, render_prompt
from laminar.errors import UserError
from tests.tiny_models import make_tokenizer

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ENTRY = Entry(source="sums", question="2 + 3?", answer="5", metadata={"level": "easy", "range": [1, 9]})


def data(**keys: object) -> DataConfig:
    return DataConfig.model_validate({"source": {"type": "jsonl", "path": "none.jsonl"}, **keys})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


def test_a_template_uses_the_question_and_the_metadata() -> None:
    assert render_prompt("{question}", ENTRY) == "2 + 3?"
    text = render_prompt("[{level}, to {range[1]}] {question} {{boxed}}\nAnswer:", ENTRY)
    assert text == "[easy, to 9] 2 + 3? {boxed}\nAnswer:"


def test_braces_in_the_data_are_left_alone() -> None:
    entry = Entry(source="code", question="print({x})", answer="")
    assert render_prompt("{question}!", entry) == "print({x})!"


@pytest.mark.parametrize(
    "template", ["{query}", "{}", "{0}", "{question.missing}", "{level[9]}", "{question", "{level:d}"]
)
def test_a_template_that_does_not_fit(template: str) -> None:
    with pytest.raises(UserError, match=r"data\.prompt_template: .* of sums"):
        render_prompt(template, ENTRY)


def test_an_unknown_field_gets_the_list_of_what_there_is() -> None:
    with pytest.raises(UserError, match=r"no field 'query' in an entry of sums; there are: level, question, range\."):
        render_prompt("{query}", ENTRY)


def test_token_ids_and_back(model: Path) -> None:
    encoder = PromptEncoder(load_tokenizer(str(model)), data(prompt_template="{question} ü "))
    ids = encoder.encode(ENTRY)
    assert ids.dtype == np.int32
    assert ids.shape == (len("2 + 3? ü ".encode()),)
    assert encoder.decode(ids) == "2 + 3? ü "


def test_special_tokens_and_unknown_ids_leave_no_text(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    encoder = PromptEncoder(tokenizer, data(prompt_template="{question}"))
    inside_padded_vocabulary = 290  # of the model, past the tokenizer's last id
    ids = np.array([*tokenizer.encode("a , b"), inside_padded_vocabulary, tokenizer.eos_token_id], dtype=np.int32)
    assert encoder.decode(ids) == "a , b"
    assert encoder.decode(np.empty(0, np.int32)) == ""


def test_chat_wraps_the_filled_in_template(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = CHAT_TEMPLATE
    plain = PromptEncoder(tokenizer, data(prompt_template="Q: {question}", chat=True))
    assert plain.decode(plain.encode(ENTRY)) == "<user>Q: 2 + 3?\n<assistant>"
    system = PromptEncoder(tokenizer, data(prompt_template="{question}", chat=True, system_prompt="Be brief."))
    ids = system.encode(ENTRY)
    assert ids.dtype == np.int32
    assert system.decode(ids) == "<system>Be brief.\n<user>2 + 3?\n<assistant>"


def test_chat_without_a_chat_template(model: Path) -> None:
    with pytest.raises(UserError, match=r"data\.chat: true, but the model's tokenizer has no chat template"):
        PromptEncoder(load_tokenizer(str(model)), data(prompt_template="{question}", chat=True))


def test_conversations_go_through_the_chat_template_whole(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = CHAT_TEMPLATE
    history = (Message(role="user", content="2 + 2?"), Message(role="assistant", content="4"))
    entry = Entry(source="sums", question="and 3?", answer="5", history=history)
    encoder = PromptEncoder(tokenizer, data(chat=True, prompt_template="{question}!", system_prompt="Be brief."))
    text = "<system>Be brief.\n<user>2 + 2?\n<assistant>4\n<user>and 3?!\n<assistant>"
    assert encoder.decode(encoder.encode(entry)) == text

    with pytest.raises(UserError, match=r"data\.chat: false, but an entry of sums is a conversation of 3 messages"):
        PromptEncoder(tokenizer, data()).encode(entry)
    own = Entry(source="sums", question="?", answer="", history=(Message(role="system", content="Be kind."),))
    with pytest.raises(UserError, match=r"data\.system_prompt: set, but an entry of sums has a system message"):
        encoder.encode(own)
    without = PromptEncoder(tokenizer, data(chat=True))
    assert without.decode(without.encode(own)) == "<system>Be kind.\n<user>?\n<assistant>"


def test_a_chat_template_and_its_variables_of_ones_own(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }}{% if think %}<think>{% endif %}")
    keys = {"chat": True, "chat_template": str(path)}
    plain = PromptEncoder(tokenizer, data(**keys))
    assert plain.decode(plain.encode(ENTRY)) == "2 + 3?"
    thinking = PromptEncoder(tokenizer, data(**keys, chat_template_params={"think": True}))
    assert thinking.decode(thinking.encode(ENTRY)) == "2 + 3?<think>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"data\.chat_template: cannot read .*chat\.jinja: No such file"),
        (" \n", r"data\.chat_template: .*chat\.jinja is empty"),
        ("{% if %}", r"data\.chat_template: the chat template cannot be applied: TemplateSyntaxError: "),
        ("{{ raise_exception('no user') }}", r"the chat template cannot be applied: TemplateError: no user"),
    ],
)
def test_a_bad_chat_template(model: Path, tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "chat.jinja"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        PromptEncoder(load_tokenizer(str(model)), data(chat=True, chat_template=str(path))).encode(ENTRY)


def test_a_prompt_of_no_tokens(model: Path) -> None:
    encoder = PromptEncoder(load_tokenizer(str(model)), data(prompt_template=""))
    with pytest.raises(UserError, match=r"has no tokens"):
        encoder.encode(ENTRY)


def test_a_folder_without_a_usable_tokenizer(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path: .*missing is not a folder"):
        load_tokenizer(str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"model\.path: no tokenizer can be read from"):
        load_tokenizer(str(tmp_path))
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (damaged / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"model\.path: no tokenizer can be read from"):
        load_tokenizer(str(damaged))


def test_tokenizing_imports_no_torch(model: Path) -> None:
    code = (
        "import sys\n"
        "from laminar.config.data_schema import DataConfig\n"
        "from laminar.data.source import Entry\n"
        "from laminar.data.tokenize import PromptEncoder, load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(model)!r}); tokenizer.chat_template = {CHAT_TEMPLATE!r}\n"
        "data = DataConfig.model_validate({'source': {'type': 'jsonl', 'path': 'x'}, 'chat': True})\n"
        "encoder = PromptEncoder(tokenizer, data)\n"
        "encoder.decode(encoder.encode(Entry(source='s', question='q', answer='')))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

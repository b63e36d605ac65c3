from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from laminar.data.source import Entry
from laminar.data.tokenize import PromptEncoder, load_tokenizer, render_prompt
from laminar.errors import UserError
from tests.tiny_models import make_tokenizer

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ENTRY = Entry(source="sums", question="2 + 3?", answer="5", metadata={"level": "easy", "range": [1, 9]})


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
    encoder = PromptEncoder(load_tokenizer(str(model)), template="{question} ü ")
    ids = encoder.encode(ENTRY)
    assert ids.dtype == np.int32
    assert ids.shape == (len("2 + 3? ü ".encode()),)
    assert encoder.decode(ids) == "2 + 3? ü "


def test_special_tokens_and_unknown_ids_leave_no_text(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    encoder = PromptEncoder(tokenizer, template="{question}")
    inside_padded_vocabulary = 290  # of the model, past the tokenizer's last id
    ids = np.array([*tokenizer.encode("a , b"), inside_padded_vocabulary, tokenizer.eos_token_id], dtype=np.int32)
    assert encoder.decode(ids) == "a , b"
    assert encoder.decode(np.empty(0, np.int32)) == ""


def test_chat_wraps_the_filled_in_template(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = CHAT_TEMPLATE
    plain = PromptEncoder(tokenizer, template="Q: {question}", chat=True)
    assert plain.decode(plain.encode(ENTRY)) == "<user>Q: 2 + 3?\n<assistant>"
    system = PromptEncoder(tokenizer, template="{question}", chat=True, system_prompt="Be brief.")
    ids = system.encode(ENTRY)
    assert ids.dtype == np.int32
    assert system.decode(ids) == "<system>Be brief.\n<user>2 + 3?\n<assistant>"


def test_chat_without_a_chat_template(model: Path) -> None:
    with pytest.raises(UserError, match=r"data\.chat: true, but the model's tokenizer has no chat template"):
        PromptEncoder(load_tokenizer(str(model)), template="{question}", chat=True)


def test_a_prompt_of_no_tokens(model: Path) -> None:
    encoder = PromptEncoder(load_tokenizer(str(model)), template="")
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
        "from laminar.data.source import Entry\n"
        "from laminar.data.tokenize import PromptEncoder, load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(model)!r}); tokenizer.chat_template = {CHAT_TEMPLATE!r}\n"
        "encoder = PromptEncoder(tokenizer, template='{question}', chat=True)\n"
        "encoder.decode(encoder.encode(Entry(source='s', question='q', answer='')))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

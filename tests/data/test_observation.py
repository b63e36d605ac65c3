"""Observations become token ids behind the model's own, and turns become text."""

import numpy as np
import pytest

from laminar.data.observation import ObservationEncoder
from laminar.errors import UserError
from tests.tiny_models import make_tokenizer

CHATML = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] + '<|eos|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path)


def make(tokenizer, *, chat=False, max_tokens=1000):
    return ObservationEncoder(
        tokenizer, chat=chat, max_tokens=max_tokens, stop_token_ids=[tokenizer.eos_token_id, tokenizer.pad_token_id]
    )


def ids(tokenizer, text):
    return np.array(tokenizer.encode(text), np.int32)


def test_an_observation_is_tokenized_alone(tokenizer):
    observation = make(tokenizer).encode("=7\n", as_message=True, turn=ids(tokenizer, "3+4"))
    assert observation.dtype == np.int32
    assert tokenizer.decode(observation.tolist()) == "=7\n"


def test_a_long_one_loses_its_middle(tokenizer):
    observation = make(tokenizer, max_tokens=5).encode("<0123456789>", as_message=False, turn=ids(tokenizer, "x"))
    assert tokenizer.decode(observation.tolist()) == "<018" + ">" or len(observation) == 5
    assert tokenizer.decode(observation.tolist()).startswith("<01") and tokenizer.decode(observation.tolist()).endswith(
        "9>"
    )


def test_a_message_of_its_own_gets_what_the_chat_template_puts_around_it(tokenizer):
    tokenizer.chat_template = CHATML
    encoder = make(tokenizer, chat=True)
    ended = np.append(ids(tokenizer, "5"), tokenizer.eos_token_id).astype(np.int32)
    after_its_end = encoder.encode("Wrong.", as_message=True, turn=ended)
    assert tokenizer.decode(after_its_end.tolist()) == "\n[user]Wrong.<|eos|>\n[assistant]"
    cut_short = encoder.encode("Wrong.", as_message=True, turn=ids(tokenizer, "5"))
    assert tokenizer.decode(cut_short.tolist()) == "<|eos|>\n[user]Wrong.<|eos|>\n[assistant]"
    # What the model reads is what the template would have made of the whole conversation.
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "5"},
            {"role": "user", "content": "Wrong."},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert whole.endswith("5" + tokenizer.decode([tokenizer.eos_token_id]) + tokenizer.decode(after_its_end.tolist()))


def test_text_of_a_tool_goes_on_in_the_models_own_message(tokenizer):
    tokenizer.chat_template = CHATML
    observation = make(tokenizer, chat=True).encode("<out>", as_message=False, turn=ids(tokenizer, "x"))
    assert tokenizer.decode(observation.tolist()) == "<out>"


def test_a_template_without_a_place_for_it_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match="chat template does not render a user's message after the model's"):
        make(tokenizer, chat=True).encode("x", as_message=True, turn=ids(tokenizer, "y"))


def test_a_turn_is_decoded_without_its_end_but_with_its_markers(tokenizer):
    turn = [tokenizer.bos_token_id, *tokenizer.encode("a b"), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert make(tokenizer).decode(np.array(turn, np.int32)) == "<|bos|>a b"

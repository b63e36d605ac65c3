"""Tiny random language models for tests: made in a fraction of a second, nothing downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 300  # of the model; not a multiple of 64, so that padded vocabularies are tested too


def make_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Save a byte-level tokenizer (256 bytes and three special tokens) in a folder."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )
    fast.save_pretrained(path)
    return fast


def make_model(
    path: Path, *, seed: int, layers: int = 2, hidden: int = 64, tied: bool = True, context_tokens: int = 1024
) -> Path:
    """Save a random Qwen3 model in float32 with its tokenizer; the same seed gives the same weights.

    The weights are drawn wider than usual, so that greedy outputs vary with the prompt.
    """
    tokenizer = make_tokenizer(path)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(path)
    return path

#!/usr/bin/env python
"""Make the tiny language model that the quickstart trains: `python scripts/make_tiny_model.py --output models/tiny`.

A Qwen3 of under a million parameters with a character tokenizer, warmed up by supervised learning on the tasks of
`configs/quickstart.yaml` (two reasoning-gym generators). Most demonstrations of the first only
repeat the given text, so the model ends up able to solve the task but in two minds about it: reinforcement learning has
a skill to sharpen.

Invariant: a folder that holds the marker file is complete (the marker is written last), and is never overwritten
without `--force`. The number of optimizer steps is fixed, not the time, so a seed gives the same model on any day.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import string
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

MARKER = "laminar_tiny_model.json"  # written last: its presence means the folder is complete
CONTEXT_TOKENS = 1024
PROMPT_TEMPLATE = "{question}\nAnswer:"  # data.prompt_template of configs/quickstart.yaml
IGNORED_LABEL = -100
CLEAN_SHARE = 0.75  # of the warm-up's steps have clean demonstrations

# The fixed phrases of the questions are one token each: a character tokenizer would spend 50 tokens on every prompt.
PHRASES = (
    "Spell this word backward (example: sun -> nus): ",
    "Decrypt this Caesar cipher text: ",
    ". Provide only the decrypted text as your final answer.",
    "\nAnswer:",
)


@dataclass(kw_only=True, frozen=True, slots=True)
class Task:
    """One reasoning-gym generator of the mixture, and how it is demonstrated."""

    name: str  # reasoning-gym data set
    weight: float  # share of the prompts in reinforcement learning
    params: dict[str, int]  # arguments of the generator
    demonstrations: int  # per optimizer step
    spoiled: float  # share of the late demonstrations in which every letter is replaced by a random one


TASKS = (
    Task(
        name="spell_backward",
        weight=0.9,
        params={"min_word_len": 3, "max_word_len": 6},
        demonstrations=48,
        spoiled=0.65,
    ),
    # The long tail: responses ten times as long as the others'.
    Task(
        name="caesar_cipher",
        weight=0.1,
        params={"min_words": 4, "max_words": 8, "min_rotation": 3, "max_rotation": 3},
        demonstrations=8,
        spoiled=0.0,
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Command line entry: returns 0 when the model is there, 2 when the folder is in the way."""
    args = parse_args(argv)
    output: Path = args.output
    if (output / MARKER).is_file() and not args.force:
        print(f"{output}: already there (--force makes it anew)")
        return 0
    if output.exists() and any(output.iterdir()) and not args.force:
        print(f"error: {output} holds files but no complete model; remove it or pass --force", file=sys.stderr)
        return 2

    started = time.monotonic()
    disable_progress_bar()
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {len(tokenizer)} tokens, {torch.get_num_threads()} threads", flush=True)
    loss = warm_up(model, tokenizer, steps=args.steps, seed=args.seed)
    warmed_up = time.monotonic() - started
    print(f"warm-up: {warmed_up:.1f} s; sampling {args.evaluate} responses at temperature 1", flush=True)
    rewards = evaluate(model, tokenizer, prompts=args.evaluate, seed=args.seed + 1)
    for name, reward in rewards.items():
        print(f"reward {reward:.3f}  {name}")

    facts = {"parameters": parameters, "seed": args.seed, "steps": args.steps, "loss": loss, "reward": rewards}
    save(model, tokenizer, output, facts)
    print(f"{output}: written after {time.monotonic() - started:.1f} s")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Make the tiny model that the quickstart trains.")
    parser.add_argument(
        "--output", type=Path, default=Path("models/tiny"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and sampling (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=360, help="optimizer steps of the warm-up (default: %(default)s)")
    parser.add_argument(
        "--evaluate", type=int, default=512, help="responses to sample at the end (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    return parser.parse_args(argv)


def build_tokenizer(phrases: Sequence[str] = PHRASES) -> PreTrainedTokenizerFast:
    """Printable ASCII and newline, a token each; the fixed phrases, a token each; `<eos>`, `<pad>`, `<unk>`."""
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))  # no merges: characters stay alone
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 in fp32 with tied embeddings, its weights drawn from torch's global generator."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def entries(task: Task, seed: int) -> Iterator[dict[str, Any]]:
    """Endless reasoning-gym entries of `task`; different seeds give disjoint streams."""
    size = 1_000_000
    data = reasoning_gym.create_dataset(task.name, seed=seed * size, size=size, **task.params)
    index = 0
    while True:
        yield data[index % size]
        index += 1


def prompt_text(entry: dict[str, Any]) -> str:
    """What the model reads of `entry`."""
    return PROMPT_TEMPLATE.format(question=entry["question"])


def demonstration(entry: dict[str, Any], spoiled: float, rng: random.Random) -> str:
    """An answer to `entry`: the right one, or (a share `spoiled` of the time) as many random letters."""
    answer = str(entry["answer"])
    if rng.random() >= spoiled:
        return answer
    letters = string.ascii_lowercase if answer.islower() else string.ascii_uppercase
    return "".join(rng.choice(letters) if character.isalpha() else character for character in answer)


def demonstrate(
    entries: list[dict[str, Any]], spoiled: float, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both int64 [len(entries), T]: prompt, answer, `<eos>`, padded on the right."""
    rows: list[tuple[list[int], list[int]]] = []
    for entry in entries:
        answer = demonstration(entry, spoiled, rng)
        prompt = tokenizer.encode(prompt_text(entry), add_special_tokens=False)
        response = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append((prompt + response, [IGNORED_LABEL] * len(prompt) + response))
    return pad(rows, tokenizer)


def pad(
    rows: list[tuple[list[int], list[int]]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of rows (as many labels as ids in each), both int64 [len(rows), T], padded on the right."""
    length = max(len(ids) for ids, _ in rows)
    token_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    all_labels = torch.full((len(rows), length), IGNORED_LABEL)
    for row, (ids, labels) in enumerate(rows):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        all_labels[row, : len(ids)] = torch.tensor(labels)
    return token_ids, all_labels


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices (half the steps that AdamW needs here), AdamW for embeddings and norms."""
    hidden = [value for name, value in model.named_parameters() if value.ndim == 2 and "embed" not in name]
    others = [value for name, value in model.named_parameters() if value.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int) -> float:
    """Supervised learning on demonstrations, `steps` optimizer steps; returns the last loss (nats per answer token).

    The skill is learned from clean demonstrations first; only the late ones are spoiled.
    """
    rng = random.Random(seed)
    sources = [entries(task, seed) for task in TASKS]

    def backward(step: int) -> float:
        clean = step <= CLEAN_SHARE * steps
        batches = [
            demonstrate(list(islice(source, task.demonstrations)), 0.0 if clean else task.spoiled, tokenizer, rng)
            for task, source in zip(TASKS, sources, strict=True)
        ]
        answer_tokens = sum(int((labels != IGNORED_LABEL).sum()) for _, labels in batches)
        loss = 0.0
        for token_ids, labels in batches:  # a batch per task: their lengths differ too much to share the padding
            logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
            summed = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
            )
            (summed / answer_tokens).backward()
            loss += summed.item() / answer_tokens
        return loss

    return optimize(model, steps, backward)


def optimize(model: Qwen3ForCausalLM, steps: int, backward: Callable[[int], float]) -> float:
    """Make `steps` optimizer steps; returns the last loss.

    Args:
        backward: adds the gradients of a step (1 to `steps`) and returns its loss.
    """
    optimizers = build_optimizers(model)
    ramp = max(1, steps // 20)
    schedules = [
        LambdaLR(optimizer, lambda step: min((step + 1) / ramp, max(0.02, (steps - step) / (steps - ramp + 1))))
        for optimizer in optimizers
    ]
    model.train()
    started = time.monotonic()
    loss = float("nan")
    for step in range(1, steps + 1):
        loss = backward(step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step == 1 or step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss:.3f}  {time.monotonic() - started:.1f} s", flush=True)
    return loss


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, prompts: int, seed: int
) -> dict[str, float]:
    """Mean reward per task, and `all` over the mixture, of one response at temperature 1 to each of `prompts` prompts."""
    model.eval()
    means: dict[str, float] = {}
    overall = 0.0
    for task in TASKS:
        source = entries(task, seed)
        asked = [next(source) for _ in range(max(1, round(prompts * task.weight)))]
        inputs = tokenizer([prompt_text(entry) for entry in asked], return_tensors="pt", padding=True)
        outputs = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=160,
        )
        answers = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scorer = reasoning_gym.create_dataset(task.name, seed=seed, size=1, **task.params)
        rewards = [scorer.score_answer(answer, entry) for answer, entry in zip(answers, asked, strict=True)]
        means[task.name] = sum(rewards) / len(rewards)
        overall += task.weight * means[task.name]
    return {**means, "all": overall}


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path, facts: dict[str, Any]) -> None:
    """Write model, tokenizer and generation config beside `output`, then move them there; the marker is written last."""
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
    if output.exists():
        shutil.rmtree(output)
    os.replace(partial, output)


if __name__ == "__main__":
    sys.exit(main())

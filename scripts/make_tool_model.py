#!/usr/bin/env python
"""Make the tiny model that `configs/tool_use_tiny.yaml` trains: `python scripts/make_tool_model.py --output models/tiny-tool`.

The model of `make_tiny_model.py`, warmed up on products of two numbers, which are beyond it. It is shown two ways: to have
Python multiply them and copy what comes back, and (most of the time, late in the warm-up) to guess. So it can use the
tool, but rarely does; reinforcement learning has to find out that the tool is worth it.

Invariant: as of `make_tiny_model.py`, whose marker says that the folder is complete.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import make_tiny_model as tiny
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

TASK = tiny.Task(
    name="products",
    weight=1.0,
    params={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    demonstrations=64,
    spoiled=0.7,
)
CODE, END, OUTPUT, BACK = "<code>print(", ")</code>", "<output>", "</output>"  # the markers of `python_tool`
PHRASES = (
    "Solve the following multiplication: ",
    ". Give only the result as your final answer.",
    "\nAnswer:",
    *(CODE, END, OUTPUT, BACK),
)


def main(argv: list[str] | None = None) -> int:
    """Command line entry: returns 0 when the model is there, 2 when the folder is in the way."""
    args = parse_args(argv)
    output: Path = args.output
    if (output / tiny.MARKER).is_file():
        print(f"{output}: already there")
        return 0
    if output.exists() and any(output.iterdir()):
        print(f"error: {output} holds files but no complete model; remove it", file=sys.stderr)
        return 2
    started = time.monotonic()
    disable_progress_bar()
    torch.manual_seed(args.seed)
    tokenizer = tiny.build_tokenizer(PHRASES)
    model = tiny.build_model(tokenizer)
    loss = warm_up(model, tokenizer, steps=args.steps, seed=args.seed)
    tiny.save(model, tokenizer, output, {"seed": args.seed, "steps": args.steps, "loss": loss})
    print(f"{output}: written after {time.monotonic() - started:.1f} s")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Make the tiny model that learns to use a tool.")
    parser.add_argument(
        "--output", type=Path, default=Path("models/tiny-tool"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of the warm-up (default: %(default)s)")
    return parser.parse_args(argv)


def demonstration(entry: dict[str, Any], spoiled: float, rng: random.Random) -> list[tuple[str, bool]]:
    """(text, whether the model writes it): the tool used, or (a share `spoiled` of the time) as many random digits."""
    answer = str(entry["answer"])
    if rng.random() < spoiled:
        return [("".join(rng.choice("0123456789") for _ in answer), True)]
    expression = entry["metadata"]["expression"]
    return [(f"{CODE}{expression}{END}", True), (f"{OUTPUT}{answer}{BACK}", False), (answer, True)]


def demonstrate(
    entries: list[dict[str, Any]], spoiled: float, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both int64 [len(entries), T], padded on the right; what the tool writes has no labels."""
    rows: list[tuple[list[int], list[int]]] = []
    for entry in entries:
        ids: list[int] = tokenizer.encode(tiny.prompt_text(entry), add_special_tokens=False)
        labels = [tiny.IGNORED_LABEL] * len(ids)
        for text, own in demonstration(entry, spoiled, rng):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            labels += piece if own else [tiny.IGNORED_LABEL] * len(piece)
        rows.append(([*ids, tokenizer.eos_token_id], [*labels, tokenizer.eos_token_id]))
    return tiny.pad(rows, tokenizer)


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int) -> float:
    """Supervised learning on demonstrations, `steps` optimizer steps; returns the last loss (nats per token)."""
    rng = random.Random(seed)
    source = tiny.entries(TASK, seed)

    def backward(step: int) -> float:
        spoiled = 0.0 if step <= tiny.CLEAN_SHARE * steps else TASK.spoiled
        token_ids, labels = demonstrate(list(islice(source, TASK.demonstrations)), spoiled, tokenizer, rng)
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=tiny.IGNORED_LABEL
        )
        loss.backward()
        return loss.item()

    return tiny.optimize(model, steps, backward)


if __name__ == "__main__":
    sys.exit(main())

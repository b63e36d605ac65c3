"""Which corrections keep learning from stale data: the trainer's own code on a tiny model, trajectories 0 to 8 versions old.

    python benchmarks/staleness.py                              # a table
    python benchmarks/staleness.py --plot docs/staleness.svg    # and the plot of docs/algorithms.md
    python benchmarks/staleness.py --staleness 0 8 --seeds 0    # quicker

The task: repeat a symbol four times; the reward is the share that is right, by chance 1/16. Step n trains on
trajectories that version n - 1 - staleness has sampled, as a pipeline of that depth would give it; nothing else differs.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from line_plot import Line, Panel, line_plot
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from laminar.config.algorithm import algorithm_problems
from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError
from laminar.protocol.messages import TrainStep
from laminar.workers.trainer.actor import Actor
from laminar.workers.trainer.ranks import Ranks

SYMBOLS, LENGTH = 16, 4
GROUPS, GROUP_SIZE, MINI_BATCHES = 16, 8, 2
STEPS, EVALUATE_EVERY, EVALUATED_PROMPTS = 60, 6, 256
LEARNING_RATE = 6e-3  # high: with a low one, even what is 8 versions old is hardly stale

# name -> (the section `algorithm`, what it does)
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"correction": {"method": "none"}},
    "tis": {"correction": {"method": "tis", "cap": 2.0}},
    "mis": {"correction": {"method": "mis", "floor": 0.5, "cap": 2.0}},
    "decoupled_ppo": {"loss": "decoupled_ppo", "clip_high": 0.28},
    "dapo, behavior": {"old_policy": "behavior"},
    "cispo, behavior": {"loss": "cispo", "old_policy": "behavior"},
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Learned:
    """One run."""

    rewards: list[float]  # of fresh samples, every EVALUATE_EVERY steps, from step 0 on
    mismatch_kl: float  # mean over all steps

    @property
    def final(self) -> float:
        """Mean of the last two evaluations."""
        return float(np.mean(self.rewards[-2:]))


def main() -> None:
    """Run the study and print its table."""
    options = arguments()
    started = time.perf_counter()
    cells = [(variant, staleness) for variant in options.variants for staleness in options.staleness]
    runs: dict[tuple[str, int], list[Learned]] = {}
    with ProcessPoolExecutor(options.processes, get_context("spawn"), initializer=prepare) as pool:
        for cell, learned in zip(cells, pool.map(learn_all, cells, [options.seeds] * len(cells)), strict=True):
            runs[cell] = learned
            print(row(*cell, learned), flush=True)
    print("\n" + table(runs, options.variants, options.staleness))
    print(f"\n{len(runs) * len(options.seeds)} runs in {time.perf_counter() - started:.0f} s")
    if options.plot is not None:
        options.plot.write_text(plot(runs, options.variants, options.staleness), encoding="utf-8")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else "", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 4, 8], help="versions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--processes", type=int, default=1, help="runs at once, each on one core")
    parser.add_argument("--plot", type=Path, help="write an SVG file")
    return parser.parse_args()


# ------------------------------------------------------------ one run


def prepare() -> None:
    """In each process."""
    torch.set_num_threads(1)
    disable_progress_bar()


def learn_all(cell: tuple[str, int], seeds: list[int]) -> list[Learned]:
    """The runs of a variant and a staleness."""
    with tempfile.TemporaryDirectory() as folder:
        return [learn(Path(folder), *cell, seed) for seed in seeds]


def learn(folder: Path, variant: str, staleness: int, seed: int) -> Learned:
    """Train a new model from this seed, and follow the reward."""
    path = make_model(folder / str(seed), seed)
    config = experiment(path, VARIANTS[variant], seed)
    actor = Actor(config, Ranks(config))
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    sampler = copy.deepcopy(actor.model).eval()
    versions = deque([snapshot(actor.model)], maxlen=staleness + 1)
    rewards, mismatches = [evaluate(actor.model, seed)], []
    for step in range(1, STEPS + 1):
        sampler.load_state_dict(versions[0])
        metrics = actor.train_step(train_step(sampler, step, random))
        mismatches.append(metrics["mismatch_kl"])
        versions.append(snapshot(actor.model))
        if step % EVALUATE_EVERY == 0:
            rewards.append(evaluate(actor.model, seed))
    return Learned(rewards=rewards, mismatch_kl=float(np.mean(mismatches)))


def experiment(path: Path, algorithm: dict[str, Any], seed: int) -> ExperimentConfig:
    """The config of a run."""
    config = ExperimentConfig.model_validate(
        {
            "name": "staleness",
            "seed": seed,
            "model": {"path": str(path)},
            "data": {"source": {"type": "jsonl", "path": "none.jsonl"}},
            "rollout": {"max_response_tokens": LENGTH},
            "trainer": {
                "steps": STEPS,
                "groups_per_step": GROUPS,
                "group_size": GROUP_SIZE,
                "mini_batches": MINI_BATCHES,
                "optimizer": {"learning_rate": LEARNING_RATE},
            },
            "algorithm": algorithm,
        }
    )
    for problem in algorithm_problems(config):
        raise UserError(problem)
    return config


def make_model(path: Path, seed: int) -> Path:
    """A folder with a random model of one layer and a tokenizer of one token per symbol."""
    vocabulary = {str(symbol): symbol for symbol in range(SYMBOLS)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="0")))
    tokenizer.save_pretrained(path)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=SYMBOLS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def snapshot(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A copy of the weights."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: NDArray[np.int64],  # int64 [B, 1]
    generator: torch.Generator | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(responses, their logprobs), both [B, LENGTH]."""
    token_ids = torch.from_numpy(prompts)
    logprobs = []
    for _ in range(LENGTH):
        distribution = torch.log_softmax(model(input_ids=token_ids).logits[:, -1], -1)
        chosen = torch.multinomial(distribution.exp(), 1, generator=generator)
        logprobs.append(distribution.gather(-1, chosen))
        token_ids = torch.cat([token_ids, chosen], 1)
    return token_ids[:, 1:].numpy(), torch.cat(logprobs, 1).numpy()


def train_step(sampler: PreTrainedModel, step: int, random: np.random.Generator) -> TrainStep:
    """A batch as the controller would send it."""
    prompts = np.repeat(random.integers(0, SYMBOLS, (GROUPS, 1)), GROUP_SIZE, axis=0)
    responses, logprobs = sample(sampler, prompts)
    number = len(prompts)
    return TrainStep(
        order=step,
        step=step,
        part=0,
        mini_batches=MINI_BATCHES,
        publish_version=step,
        group_ids=np.repeat(np.arange(GROUPS, dtype=np.int64), GROUP_SIZE),
        rewards=(prompts == responses).mean(1).astype(np.float32),
        prompt_lengths=np.ones(number, np.int32),
        response_lengths=np.full(number, LENGTH, np.int32),
        token_ids=np.concatenate([prompts, responses], 1).astype(np.int32).ravel(),
        loss_mask=np.ones(number * LENGTH, np.uint8),
        engine_logprobs=logprobs.ravel(),
        staleness=np.zeros(number, np.int32),
    )


def evaluate(model: PreTrainedModel, seed: int) -> float:
    """Mean reward of fresh samples, on prompts and with draws that are the same for all variants of a seed."""
    prompts = np.random.default_rng([seed, 1]).integers(0, SYMBOLS, (EVALUATED_PROMPTS, 1))
    responses, _ = sample(model, prompts, torch.Generator().manual_seed(seed))
    return float((prompts == responses).mean())


# ------------------------------------------------------------ what came of it


def row(variant: str, staleness: int, runs: list[Learned]) -> str:
    """One line while the study runs."""
    finals = ", ".join(" ".join(f"{reward:.2f}" for reward in run.rewards) for run in runs)
    return (
        f"{variant:16} staleness {staleness}: {finals} (mismatch_kl {np.mean([run.mismatch_kl for run in runs]):.3f})"
    )


def table(runs: dict[tuple[str, int], list[Learned]], variants: list[str], levels: list[int]) -> str:
    """Markdown: mean of the seeds, and the lowest of them."""
    lines = ["| correction | " + " | ".join(map(str, levels)) + " |", "| --- |" + " --- |" * len(levels)]
    for variant in variants:
        finals = [[run.final for run in runs[variant, staleness]] for staleness in levels]
        lines.append(f"| {variant} | " + " | ".join(f"{np.mean(own):.2f} ({min(own):.2f})" for own in finals) + " |")
    return "\n".join(lines)


def plot(runs: dict[tuple[str, int], list[Learned]], variants: list[str], levels: list[int]) -> str:
    """SVG: a panel per level of staleness, a line per variant, its seeds as thin ones."""
    steps = [float(step) for step in range(0, STEPS + 1, EVALUATE_EVERY)]
    panels = []
    for staleness in levels:
        lines = [
            Line(name=variant, xs=steps, each=[run.rewards for run in runs[variant, staleness]]) for variant in variants
        ]
        panels.append(Panel(title=f"{staleness} versions old", lines=lines))
    return line_plot(panels, x_title="step", y_title="reward", y_range=(0.0, 1.0))


if __name__ == "__main__":
    main()

"""What a rollout pays for new weights: by shard against slicing full tensors, and against a plain memory copy.

    python benchmarks/reshard.py [--hidden 1024] [--layers 8] [--repeats 5] [--engine vllm torch] [--json]

- slices: what the ranks of a replica read, out of a version laid out for shards and out of a plain one, without an engine
  (row-parallel matrices only).
- vllm_tp2: vLLM's own load of the same two versions on two ranks, in turns on one engine.
- pull: `load_weights` of an engine over a memory copy of the bytes of a version, both in the same round.

Everything is a ratio within one run. The model is random, float32, made in a temporary folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from laminar.weights import run_memory
from laminar.weights.store import WeightStore

KEEP = 2


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    """Save a random Qwen3 in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


class Versions:
    """Writes versions of one model's weights, plainly or laid out for a degree."""

    def __init__(self, model_path: Path, run_id: str) -> None:
        """Load the weights."""
        import torch
        from transformers import AutoModelForCausalLM

        from laminar.workers.trainer.model_loading import named_weights

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
        self.weights = named_weights(self.model)
        self.store = WeightStore(run_id, "reshard")
        self.version = 0

    def write(self, degree: int) -> Path:
        """Commit the next version, laid out for a degree."""
        from laminar.weights.tensors import layout_of, write_tensors
        from laminar.workers.trainer.tensor_parallel_plan import column_shards

        layout = layout_of(self.weights, shards=column_shards(self.model, self.weights, degree))
        self.version += 1
        with self.store.begin(self.version, layout) as writer:
            write_tensors(writer, self.weights.items())
            path = writer.commit()
        self.store.retain(KEEP)
        return path


def measure_slices(versions: Versions, degree: int, repeats: int) -> dict[str, float]:
    """Median seconds to copy every rank's shard of the row-parallel matrices out of either layout."""
    import torch

    from laminar.weights.tensors import read_tensors
    from laminar.workers.trainer.tensor_parallel_plan import column_shards

    torch.set_num_threads(1)
    split = column_shards(versions.model, versions.weights, degree)
    paths = {"plain": versions.write(1), "shards": versions.write(degree)}
    times: dict[str, list[float]] = {"plain": [], "shards": []}
    for index in range(repeats + 1):
        for kind, path in paths.items():
            tensors = {name: tensor for name, tensor in read_tensors(path) if name in split}
            sizes = {name: tensor.shape[1] // degree for name, tensor in tensors.items()}
            targets = {name: torch.zeros(tensor.shape[0], sizes[name]) for name, tensor in tensors.items()}
            began = time.perf_counter()
            for rank in range(degree):
                for name, tensor in tensors.items():
                    targets[name].copy_(tensor.narrow(1, rank * sizes[name], sizes[name]))
            if index:  # the first round brings the pages in
                times[kind].append(time.perf_counter() - began)
    plain, shards = median(times["plain"]), median(times["shards"])
    return {"plain_s": plain, "shards_s": shards, "plain_over_shards": plain / shards}


def _engine(model_path: Path, degree: int) -> Any:
    """vLLM of a degree; the torch engine for 0."""
    from laminar.workers.rollout.engine import EngineSettings
    from laminar.workers.rollout.engines import choose_engine

    return choose_engine(
        "vllm" if degree else "torch",
        EngineSettings(
            model_path=str(model_path),
            dtype="float32",
            context_tokens=128,
            max_running=4,
            kv_cache_bytes=64 << 20,
            tensor_parallel=max(1, degree),
            threads=1,
            seed=0,
        ),
    )[0]


def measure_load(versions: Versions, model_path: Path, degree: int, repeats: int) -> dict[str, float]:
    """Median seconds of vLLM's load on `degree` ranks of a plain version and of one laid out for them, in turns."""

    async def measure() -> dict[str, list[float]]:
        engine = _engine(model_path, degree)
        await engine.start()
        times: dict[str, list[float]] = {"plain": [], "shards": []}
        try:
            for index in range(repeats + 1):
                for kind, layout_degree in (("plain", 1), ("shards", degree)):
                    path = versions.write(layout_degree)
                    began = time.perf_counter()
                    await engine.load_weights(str(path), versions.version)
                    if index:
                        times[kind].append(time.perf_counter() - began)
        finally:
            await engine.close()
        return times

    times = asyncio.run(measure())
    plain, shards = median(times["plain"]), median(times["shards"])
    return {"plain_s": plain, "shards_s": shards, "plain_over_shards": plain / shards}


def measure_pull(engine_name: str, model_path: Path, run_id: str, repeats: int = 5) -> dict[str, float]:
    """Medians of what an engine's `load_weights` takes, and of a memory copy of the version's bytes, in turns.

    Args:
        engine_name: "vllm" or "torch".
        model_path: a Hugging Face model folder (`make_model` makes one).
        run_id: a run whose folder in shared memory this process has claimed.
        repeats: rounds that count; one more goes before them.

    Returns:
        nbytes, copy_s, pull_s, pull_over_copy.
    """
    versions = Versions(model_path, run_id)

    async def measure() -> dict[str, Any]:
        engine = _engine(model_path, 1 if engine_name == "vllm" else 0)
        await engine.start()
        copies, pulls = [], []
        source = target = np.empty(0, np.uint8)
        try:
            for index in range(repeats + 1):
                path = versions.write(1)
                with versions.store.open(versions.version) as reader:
                    if not index:
                        source, target = reader.buffer.copy(), np.ones(reader.buffer.size, np.uint8)
                began = time.perf_counter()
                np.copyto(target, source)
                copied = time.perf_counter()
                await engine.load_weights(str(path), versions.version)
                if index:
                    copies.append(copied - began)
                    pulls.append(time.perf_counter() - copied)
        finally:
            await engine.close()
        copy_s, pull_s = median(copies), median(pulls)
        return {"nbytes": source.size, "copy_s": copy_s, "pull_s": pull_s, "pull_over_copy": pull_s / copy_s}

    try:
        return asyncio.run(measure())
    finally:
        versions.store.remove()


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table(title=f"loading weights of {figures['mib']:.0f} MiB, medians of {figures['repeats']}")
    for column in ("what", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row(
        "slices of 2 ranks, row-parallel matrices: plain / by shard", f"{figures['slices']['plain_over_shards']:.2f}"
    )
    if "vllm_tp2" in figures:
        table.add_row("vLLM on 2 ranks, all of it: plain / by shard", f"{figures['vllm_tp2']['plain_over_shards']:.2f}")
    for name, pull in figures["pull"].items():
        table.add_row(f"pull into {name} / memory copy", f"{pull['pull_over_copy']:.2f}")
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model, a multiple of 256")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", nargs="*", default=["vllm", "torch"], choices=["vllm", "torch"])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    run_id = f"benchmark-{os.getpid()}"
    run_memory.claim(run_id)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model_path = make_model(Path(folder), options.hidden, options.layers)
            pulls = {name: measure_pull(name, model_path, run_id, options.repeats) for name in options.engine}
            versions = Versions(model_path, run_id)
            figures: dict[str, Any] = {"repeats": options.repeats, "pull": pulls}
            figures["slices"] = measure_slices(versions, 2, options.repeats)
            figures["mib"] = versions.store.path(versions.version).stat().st_size / (1 << 20)
            if "vllm" in options.engine:
                figures["vllm_tp2"] = measure_load(versions, model_path, 2, options.repeats)
    finally:
        run_memory.remove(run_id)
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)


if __name__ == "__main__":
    main()

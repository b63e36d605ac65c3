"""What a move costs a trajectory, with its KV and without: two engines of one kind, one context length after the other.

    python benchmarks/kv_moves.py [--models models/tiny models/smollm2-135m] [--engines torch vllm] [--lengths 32 128 ...]
                                  [--rounds 5] [--dtype float32] [--json]

A trajectory with a context of that many tokens is stopped at the source and goes on at the target; both ways in turn, with
prompts that no engine has seen before. The pause is what the trajectory waits: from the stop to its last delta, and from the
request at the target to its next token (which both ways compute). Medians over the rounds; the ratio is that of one run.

`kv_move_over_reprefill`, at the top of the JSON object: per engine and model, per context length, the pause with KV over the
pause without. `wins_from`: the smallest measured length from which on the ratio stays below 1 (null: at none).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from laminar.errors import UserError
from laminar.workers.rollout.engine import EngineSettings, GenerationRequest, KvExported, KvImported, RolloutEngine
from laminar.workers.rollout.engines import choose_engine
from laminar.workers.rollout.kv_file import shard_path

LENGTHS = (32, 64, 128, 256, 512, 960, 2048, 4096)
SPARE_TOKENS = 64  # of the context, for what is generated
SHARED_MEMORY = "/dev/shm"


@dataclass(kw_only=True, slots=True, frozen=True)
class Pause:
    """One move."""

    seconds: float
    nbytes: int  # of the KV; 0 where it was prefilled
    export_s: float
    import_s: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Figures:
    """One engine, model and context length."""

    context_tokens: int
    nbytes: int
    export_ms: float  # inside the engine, as are the next
    import_ms: float
    move_ms: float  # the whole pause, as is the next
    reprefill_ms: float
    move_ms_per_1k_tokens: float
    reprefill_ms_per_1k_tokens: float
    kv_move_over_reprefill: float


async def stopped(
    engine: RolloutEngine, request: GenerationRequest, export: Path | None
) -> tuple[NDArray[np.int32], float, KvExported | None]:
    """Stop a stream at its first delta: (tokens, seconds that the stop took, export)."""
    tokens: list[int] = []
    started, exported = 0.0, None
    async for delta in engine.generate(request):
        tokens += delta.token_ids.tolist()
        exported = delta.exported
        if not started:
            started = time.perf_counter()
            await engine.abort(request.request_id, export)
    return np.array(tokens, np.int32), time.perf_counter() - started, exported


async def next_token(engine: RolloutEngine, request: GenerationRequest) -> tuple[float, KvImported | None]:
    """Seconds until the first token of a stream of one token."""
    started = time.perf_counter()
    imported = None
    async for delta in engine.generate(request):
        imported = delta.imported or imported
    return time.perf_counter() - started, imported


class Pair:
    """A source and a target."""

    def __init__(self, source: RolloutEngine, target: RolloutEngine, folder: Path, vocabulary: int) -> None:
        self._source = source
        self._target = target
        self._folder = folder
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(0)
        self._requests = 0

    def _request(
        self, prompt: NDArray[np.int32], tokens: NDArray[np.int32], new: int, kv: Path | None
    ) -> GenerationRequest:
        self._requests += 1
        return GenerationRequest(
            request_id=f"request-{self._requests}",
            prompt_token_ids=prompt,
            token_ids=tokens,
            max_new_tokens=new,
            temperature=0.0,
            top_p=1.0,
            stop_token_ids=(),
            kv=kv,
        )

    async def move(self, length: int, *, with_kv: bool) -> Pause:
        """Move a trajectory whose context has about this length.

        Raises:
            RuntimeError: its KV was not taken.
        """
        prompt = self._random.integers(3, self._vocabulary, length).astype(np.int32)
        kv = self._folder / f"kv-{self._requests}" if with_kv else None
        none = np.empty(0, np.int32)
        tokens, stop_s, exported = await stopped(self._source, self._request(prompt, none, SPARE_TOKENS - 2, None), kv)
        next_s, imported = await next_token(self._target, self._request(prompt, tokens, 1, kv))
        if kv is None:
            return Pause(seconds=stop_s + next_s, nbytes=0, export_s=0.0, import_s=0.0)
        if exported is None or imported is None or imported.error or not imported.tokens:
            raise RuntimeError(f"the KV of {length} tokens was not moved: {exported}, {imported}")
        for shard in range(exported.shards):
            shard_path(kv, shard).unlink()
        return Pause(
            seconds=stop_s + next_s, nbytes=exported.nbytes, export_s=exported.seconds, import_s=imported.seconds
        )


async def measure(pair: Pair, length: int, rounds: int) -> Figures:
    """Both ways, in turn."""
    moves, prefills = [], []
    for each in range(rounds + 1):  # the first warms up
        with_kv, without = await pair.move(length, with_kv=True), await pair.move(length, with_kv=False)
        if each:
            moves.append(with_kv)
            prefills.append(without)
    move = statistics.median(pause.seconds for pause in moves)
    prefill = statistics.median(pause.seconds for pause in prefills)
    return Figures(
        context_tokens=length,
        nbytes=moves[0].nbytes,
        export_ms=1e3 * statistics.median(pause.export_s for pause in moves),
        import_ms=1e3 * statistics.median(pause.import_s for pause in moves),
        move_ms=1e3 * move,
        reprefill_ms=1e3 * prefill,
        move_ms_per_1k_tokens=1e6 * move / length,
        reprefill_ms_per_1k_tokens=1e6 * prefill / length,
        kv_move_over_reprefill=move / prefill,
    )


async def measure_model(engine_name: Any, model: Path, options: argparse.Namespace) -> list[Figures]:
    """All context lengths that this model has."""
    config = json.loads((model / "config.json").read_text())
    context = min(config["max_position_embeddings"], max(options.lengths) + SPARE_TOKENS)
    heads = config["num_key_value_heads"] * (
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    )
    row_bytes = 2 * config["num_hidden_layers"] * heads * (4 if options.dtype == "float32" else 2) * context
    settings = EngineSettings(
        model_path=str(model),
        dtype=options.dtype,
        context_tokens=context,
        max_running=2,
        kv_cache_bytes=max(2 * row_bytes + (8 << 20), 16 << 20),
        tensor_parallel=1,
        threads=1,
        seed=0,
        moves_kv=True,
    )
    source, target = choose_engine(engine_name, settings)[0], choose_engine(engine_name, settings)[0]
    with tempfile.TemporaryDirectory(prefix="laminar-kv-moves-", dir=SHARED_MEMORY) as folder:
        try:
            await source.start()
            await target.start()
            pair = Pair(source, target, Path(folder), config["vocab_size"])
            lengths = [length for length in options.lengths if length + SPARE_TOKENS <= context]
            return [await measure(pair, length, options.rounds) for length in lengths]
        finally:
            await source.close()
            await target.close()


def wins_from(figures: list[Figures]) -> int | None:
    """The smallest length from which on moving takes less time."""
    longest_loss = max((each.context_tokens for each in figures if each.kv_move_over_reprefill >= 1), default=0)
    return min((each.context_tokens for each in figures if each.context_tokens > longest_loss), default=None)


def show(every: dict[str, list[Figures]]) -> None:
    """A table per engine and model."""
    console = Console(width=120)
    for name, figures in every.items():
        columns = ("context", "KV", "export", "import", "pause with KV", "re-prefill", "per 1K tokens", "ratio")
        table = Table(*columns, title=name, title_justify="left")
        for each in figures:
            table.add_row(
                str(each.context_tokens),
                f"{each.nbytes / 2**20:.2f} MiB",
                f"{each.export_ms:.2f} ms",
                f"{each.import_ms:.2f} ms",
                f"{each.move_ms:.1f} ms",
                f"{each.reprefill_ms:.1f} ms",
                f"{each.move_ms_per_1k_tokens:.1f} / {each.reprefill_ms_per_1k_tokens:.1f} ms",
                f"{each.kv_move_over_reprefill:.2f}",
            )
        console.print(table)
        console.print(f"moving wins from {wins_from(figures)} tokens on")


def main() -> int:
    """Exit status: 0, or 2 if an engine cannot run a model here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [Path("models/tiny"), Path("models/smollm2-135m")]
    parser.add_argument("--models", type=Path, nargs="+", default=models, help="Hugging Face model folders")
    parser.add_argument("--engines", nargs="+", default=["torch", "vllm"], choices=["torch", "vllm"])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="context lengths in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # its warnings are no part of the JSON
    every: dict[str, list[Figures]] = {}
    for model in options.models:
        for engine in options.engines:
            try:
                every[f"{engine} {model.name}"] = asyncio.run(measure_model(engine, model, options))
            except (UserError, FileNotFoundError) as error:
                print(error, file=sys.stderr)
                return 2
    if not options.json:
        show(every)
        return 0
    ratios = {
        name: {each.context_tokens: each.kv_move_over_reprefill for each in figures} for name, figures in every.items()
    }
    print(
        json.dumps(
            {
                "kv_move_over_reprefill": ratios,
                "wins_from": {name: wins_from(figures) for name, figures in every.items()},
                "figures": {name: [asdict(each) for each in figures] for name, figures in every.items()},
            },
            indent=2,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

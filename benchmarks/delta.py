"""What delta encoding costs and saves: `laminar.weights.delta` on one core, on made streams and on real versions.

    python benchmarks/delta.py [--versions FOLDER ...] [--mib 128] [--chunk-mib 4] [--rounds 5] [--json]

- Made streams: bf16 weights of which a share changes by one step of the bit pattern. Real ones: the version files of each
  FOLDER (`version-00000012.weights`, ...), each against the one before it; every result is compared bit for bit.
- encode, apply: GiB of the version per CPU second, chunk by chunk, and over a plain memory copy of as many bytes in the same
  run (best of `--rounds` each, taken in turn). `apply` includes the copy of what did not change.
- The account, per link: time per GiB of the version in a pipelined chain, where the slowest stage counts. In full that is
  the wire alone, as a delta max(encode, wire / ratio, apply) with one thread for encoding and one for applying. "gain" is
  full over delta (below 1 the delta loses); in parentheses, how many threads each of the two takes to be no slower than
  the wire in full. Chunks are independent, so that this counts them as adding up.

The figures at the top of the JSON object are of the first FOLDER, else of the made stream of 1 %.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from laminar.weights.delta import apply_chunk, element_widths, encode_chunk
from laminar.weights.layout import WeightLayout, chunk_spans
from laminar.weights.version_file import VersionReader

SHARES = (0.001, 0.01, 0.03, 0.1)
LINKS = (10, 25, 100, 400)  # Gbit/s
GIB = 2**30
STEP_CLASSES = ((1, 1), (2, 7), (8, 127), (128, 2**15))  # of the difference of two bit patterns, inclusive


@dataclass(kw_only=True, slots=True, frozen=True)
class Pair:
    """Two versions, one after the other."""

    new: NDArray[np.uint8]  # uint8 [N]
    base: NDArray[np.uint8]  # uint8 [N]
    spans: list[tuple[int, int]]
    widths: list[int]  # bytes of an element, per span


@dataclass(kw_only=True, slots=True, frozen=True)
class Measured:
    """One pair's figures; times are CPU seconds for all of its bytes."""

    nbytes: int
    payload_bytes: int  # chunks that go in full included
    full_chunks: int
    elements: int
    changed: int
    steps: tuple[int, ...]  # changed elements by STEP_CLASSES
    copy_s: float
    encode_s: float
    apply_s: float


def made_pair(share: float, nbytes: int, chunk_bytes: int) -> Pair:
    """bf16 weights, a share of which changed by one step, up or down."""
    rng = np.random.default_rng(0)
    base = (rng.standard_normal(nbytes // 2, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = base.copy()
    chosen = np.flatnonzero(rng.random(len(base), np.float32) < share)
    new[chosen] += np.where(rng.random(len(chosen)) < 0.5, 1, 0xFFFF).astype(np.uint16)
    spans = chunk_spans(nbytes, chunk_bytes)
    return Pair(new=new.view(np.uint8), base=base.view(np.uint8), spans=spans, widths=[2] * len(spans))


def real_pairs(folder: Path, chunk_bytes: int) -> Iterator[Pair]:
    """Every version of the folder that follows on the one before it."""
    paths = sorted(path for path in folder.iterdir() if re.fullmatch(r"version-\d{8}\.weights", path.name))
    before: VersionReader | None = None
    for path in paths:
        reader = VersionReader(path)
        if before is not None and before.policy_version + 1 == reader.policy_version and before.layout == reader.layout:
            yield _pair(reader, before, reader.layout, chunk_bytes)
        before = reader


def _pair(new: VersionReader, base: VersionReader, layout: WeightLayout, chunk_bytes: int) -> Pair:
    spans = chunk_spans(layout.total_bytes, chunk_bytes)
    # Copies, so that neither a disk nor the first touch of a mapped page is measured.
    return Pair(new=new.buffer.copy(), base=base.buffer.copy(), spans=spans, widths=element_widths(layout, spans))


def measure(pair: Pair, options: argparse.Namespace) -> Measured:
    """Encode, apply and compare; raises SystemExit if a bit differs."""
    out = np.zeros(len(pair.new), np.uint8)
    payloads: list[NDArray[np.uint8] | None] = [None] * len(pair.spans)

    def encode(index: int) -> None:
        span = slice(*pair.spans[index])
        payloads[index] = encode_chunk(pair.new[span], pair.base[span], pair.widths[index])

    def apply(index: int) -> None:
        span = slice(*pair.spans[index])
        payload = payloads[index]
        if payload is None:
            np.copyto(out[span], pair.new[span])
        else:
            apply_chunk(payload, pair.base[span], out[span])

    best = dict.fromkeys(("copy", "encode", "apply"), math.inf)
    for _ in range(options.rounds):
        best["copy"] = min(best["copy"], _seconds(lambda _: np.copyto(out, pair.base), 1))
        best["encode"] = min(best["encode"], _seconds(encode, len(pair.spans)))
        best["apply"] = min(best["apply"], _seconds(apply, len(pair.spans)))
        if not np.array_equal(out, pair.new):
            raise SystemExit("a delta did not give back the version that it was made of")
    sizes = [
        stop - start if payload is None else len(payload)
        for (start, stop), payload in zip(pair.spans, payloads, strict=True)
    ]
    changed, steps = _describe(pair)
    return Measured(
        nbytes=len(pair.new),
        payload_bytes=sum(sizes),
        full_chunks=sum(payload is None for payload in payloads),
        elements=len(pair.new) // 2,
        changed=changed,
        steps=steps,
        copy_s=best["copy"],
        encode_s=best["encode"],
        apply_s=best["apply"],
    )


def _seconds(work: Callable[[int], object], count: int) -> float:
    """CPU seconds of this thread for work(0), work(1), ...: others on the machine do not count."""
    started = time.thread_time()
    for index in range(count):
        work(index)
    return time.thread_time() - started


def _describe(pair: Pair) -> tuple[int, tuple[int, ...]]:
    """(changed 2-byte elements, how many of them by how many steps)."""
    size = len(pair.new) // 2 * 2
    new, base = pair.new[:size].view(np.uint16), pair.base[:size].view(np.uint16)
    chosen = np.flatnonzero(new != base)
    steps = np.abs((new[chosen] - base[chosen]).view(np.int16).astype(np.int32))
    return len(chosen), tuple(int(np.sum((steps >= low) & (steps <= high))) for low, high in STEP_CLASSES)


def figures_of(name: str, measured: list[Measured]) -> dict[str, Any]:
    """One stream's figures, over all its pairs."""
    total = {key: sum(getattr(one, key) for one in measured) for key in asdict(measured[0]) if key != "steps"}
    gib = total["nbytes"] / GIB
    changed = max(total["changed"], 1)
    ratio = total["nbytes"] / total["payload_bytes"]
    encode_s, apply_s = total["encode_s"] / gib, total["apply_s"] / gib
    return {
        "name": name,
        "pairs": len(measured),
        "bytes": measured[0].nbytes,
        "changed_share": total["changed"] / total["elements"],
        "changed_share_range": [
            min(one.changed / one.elements for one in measured),
            max(one.changed / one.elements for one in measured),
        ],
        "steps": {
            f"{low}..{high}": sum(one.steps[index] for one in measured) / changed
            for index, (low, high) in enumerate(STEP_CLASSES)
        },
        "bytes_per_change": total["payload_bytes"] / changed,
        "full_chunks": total["full_chunks"],
        "delta_ratio": ratio,
        "delta_ratio_range": [
            min(one.nbytes / one.payload_bytes for one in measured),
            max(one.nbytes / one.payload_bytes for one in measured),
        ],
        "encode_gib_per_s": 1 / encode_s,
        "apply_gib_per_s": 1 / apply_s,
        "encode_over_copy": total["copy_s"] / total["encode_s"],
        "apply_over_copy": total["copy_s"] / total["apply_s"],
        "cpu_s_per_gib": {"encode": encode_s, "apply": apply_s},
        "account": [account(link, ratio, encode_s, apply_s) for link in LINKS],
    }


def account(link: float, ratio: float, encode_s: float, apply_s: float) -> dict[str, Any]:
    """Seconds per GiB over a link of `link` Gbit/s, in full and as a delta."""
    full_s = GIB * 8 / (link * 1e9)
    stages = {"encode": encode_s, "wire": full_s / ratio, "apply": apply_s}
    slowest = max(stages, key=lambda stage: stages[stage])
    return {
        "gbit_per_s": link,
        "full_s": full_s,
        "delta_s": stages[slowest],
        "slowest": slowest,
        "gain": full_s / stages[slowest],
        "threads_to_match": math.ceil(max(encode_s, apply_s) / full_s),
    }


def report(streams: list[dict[str, Any]], copy_gib_per_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """The figures as they are printed by `--json`."""
    first = next((stream for stream in streams if stream["pairs"] > 1), streams[SHARES.index(0.01)])
    keys = ("delta_ratio", "changed_share", "encode_over_copy", "apply_over_copy")
    return {
        "stream": first["name"],
        **{key: first[key] for key in keys},
        "copy_gib_per_s": copy_gib_per_s,
        "chunk_mib": options.chunk_mib,
        "streams": streams,
    }


def show(figures: dict[str, Any]) -> None:
    """The figures as two tables."""
    console = Console(width=110)
    title = f"memory copy {figures['copy_gib_per_s']:.1f}, chunks of {figures['chunk_mib']:g} MiB"
    table = Table(title=title)
    account_table = Table(title="the account: gain (threads)")
    for column in ("stream", "pairs", "changed", "by 1", "B each", "ratio", "encode", "/copy", "apply", "/copy"):
        table.add_column(column, justify="right")
    for column in ("stream", *(f"{link} Gbit/s" for link in LINKS)):
        account_table.add_column(column, justify="right")
    for stream in figures["streams"]:
        table.add_row(
            stream["name"],
            str(stream["pairs"]),
            f"{stream['changed_share']:.2%}",
            f"{stream['steps']['1..1']:.0%}",
            f"{stream['bytes_per_change']:.2f}",
            f"{stream['delta_ratio']:.1f}",
            f"{stream['encode_gib_per_s']:.1f}",
            f"{stream['encode_over_copy']:.2f}",
            f"{stream['apply_gib_per_s']:.1f}",
            f"{stream['apply_over_copy']:.2f}",
        )
        account_table.add_row(
            stream["name"],
            *(f"{link['gain']:.2f} ({link['threads_to_match']})" for link in stream["account"]),
        )
    console.print(table)
    console.print(account_table)


def main() -> int:
    """Exit status: 0, or 2 if a folder holds no two versions that follow on each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=Path, nargs="*", default=[], help="folders of version files")
    parser.add_argument("--mib", type=int, default=128, help="size of a made version")
    parser.add_argument("--chunk-mib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options = parser.parse_args()
    chunk_bytes = int(options.chunk_mib * 2**20)
    measured: dict[str, list[Measured]] = {}
    for share in SHARES:
        pair = made_pair(share, options.mib * 2**20, chunk_bytes)
        measured[f"{share:.1%}"] = [measure(pair, options)]
    for folder in options.versions:
        measured[folder.name] = [measure(pair, options) for pair in real_pairs(folder, chunk_bytes)]
        if not measured[folder.name]:
            print(f"{folder}: no two versions, one after the other (version-00000001.weights, ...)", file=sys.stderr)
            return 2
    every = [one for stream in measured.values() for one in stream]
    copy_gib_per_s = sum(one.nbytes for one in every) / GIB / sum(one.copy_s for one in every)
    streams = [figures_of(name, stream) for name, stream in measured.items()]
    figures = report(streams, copy_gib_per_s, options)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

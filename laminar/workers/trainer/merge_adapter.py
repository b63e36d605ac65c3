"""`python -m laminar.workers.trainer.merge_adapter ADAPTER FOLDER`: base model and adapters as one Hugging Face folder.

Its weights are those that the trainer published for the adapters, to the bit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from laminar.config.schema import LoraConfig
from laminar.errors import UserError
from laminar.workers.trainer.adapter_files import PREFIX, WEIGHTS_FILE, read_adapter_config
from laminar.workers.trainer.lora import ADAPTER, add_adapters, gathered_weights
from laminar.workers.trainer.model_loading import load_model, load_tokenizer, save_model


def merge(adapter: Path, folder: Path, dtype: str) -> None:
    """Write the merged model with its tokenizer.

    Raises:
        UserError: no adapters there, no base model where they say that it is, or the two do not fit each other.
    """
    written = read_adapter_config(adapter)
    base = str(written["base_model_name_or_path"])
    stored: torch.dtype = getattr(torch, dtype)
    model = load_model(base, f"the base model of {adapter}", stored)
    lora = LoraConfig(
        rank=written["r"], alpha=float(written["lora_alpha"]), target_modules=list(written["target_modules"])
    )
    add_adapters(model, lora, base, seed=0)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    values = {
        name.removeprefix(PREFIX)
        .replace(".lora_A.", f".lora_A.{ADAPTER}.")
        .replace(".lora_B.", f".lora_B.{ADAPTER}."): v
        for name, v in load_file(adapter / WEIGHTS_FILE).items()
    }
    if odd := sorted(values.keys() ^ parameters.keys()):
        raise UserError(f"{adapter}: {odd[0]} is not in both the adapters and the base model {base}")
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    weights = {name: tensor.detach().to(stored) for name, tensor in gathered_weights(model)}
    save_model(model, load_tokenizer(base, f"the base model of {adapter}"), weights, dtype, folder)


def main() -> int:
    """Exit status 2 where the adapters or the base model are at fault."""
    parser = argparse.ArgumentParser(prog="python -m laminar.workers.trainer.merge_adapter", description=__doc__)
    parser.add_argument("adapter", type=Path, help="folder with adapter_config.json, such as CHECKPOINT/adapter")
    parser.add_argument("folder", type=Path, help="where the merged model goes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the merged weights")
    options = parser.parse_args()
    try:
        merge(options.adapter, options.folder, options.dtype)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"model": str(options.folder)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Which tokens end a response: what the model's own files say."""

from __future__ import annotations

import json
from pathlib import Path

from laminar.errors import UserError


def stop_token_ids(model_path: str) -> tuple[int, ...]:
    """End-of-sequence ids of `generation_config.json`, else of `config.json`.

    Raises:
        UserError: neither file names one; a response could only end by its length.
    """
    folder = Path(model_path)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    raise UserError(
        f"model.path: {model_path} names no eos_token_id in generation_config.json or config.json; "
        "add one, or responses never stop"
    )

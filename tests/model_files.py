"""A model directory that passes the checks before a run: every file that is needed, and nothing in
it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_model(folder: Path, **config: Any) -> Path:
    """config.json of a Qwen2 with these keys, an empty tokenizer, and a safetensors file without
    tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"} | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder

"""Write the text model of a Qwen3.5 directory, which the trainer and engines take.

    .venv/bin/python -m tools.text_model Qwen3.5-4B Qwen3.5-4B-text

The vision tower is left out and experts that are stacked in one tensor become separate tensors.
Layers for multi-token prediction, tokenizer and generation settings are kept. Memory is bounded by
one file of the source.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.system.model_files import read_object

ARCHITECTURES = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
"""Model type of a directory with vision → class of its text model."""
INDEX = "model.safetensors.index.json"


def main() -> None:
    """Write the directory, or exit with the error's text."""
    parser = argparse.ArgumentParser(description="Write the text model of a Qwen3.5 directory.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    try:
        write_text_model(options.source, options.target)
    except RlpipeError as error:
        sys.exit(str(error))


def write_text_model(source: Path, target: Path) -> None:
    """Write the text model of `source` to the new directory `target`.

    Raises: ConfigError for another kind of model or an existing target.
    """
    config = text_config(read_object(source / "config.json", "source"), source)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ConfigError("no weights", where=str(source), expected="*.safetensors files")
    if target.exists():
        raise ConfigError("the target exists", where=str(target), do="give a new directory")
    target.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for file in files:
        tensors = dict(text_tensors(file))
        if tensors:
            save_file(tensors, target / file.name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file.name)
    if len(set(weight_map.values())) > 1 or files[0].name != "model.safetensors":
        index = {"metadata": {}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
            shutil.copyfile(file, target / file.name)
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def text_config(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the config.json of the text model. Raises: ConfigError for another kind of model."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES or not isinstance(config.get("text_config"), dict):
        raise ConfigError(
            "this directory has no text model of its own",
            where=f"{source / 'config.json'}: model_type",
            found=kind,
            expected=" or ".join(ARCHITECTURES),
        )
    inherited = {
        name: config[name] for name in ("tie_word_embeddings", "torch_dtype") if name in config
    }
    return {
        **inherited,
        **config["text_config"],
        "architectures": [ARCHITECTURES[kind]],
        "model_type": f"{kind}_text",
    }


def text_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of a file's text weights, as the text model names them."""
    with safe_open(file, framework="pt") as tensors:
        for stored in tensors.keys():  # noqa: SIM118 - not a mapping
            if stored.startswith("model.visual."):
                continue
            name = stored.replace("model.language_model.", "model.", 1)
            yield from separate_experts(name, tensors.get_tensor(stored))


def separate_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield an expert's own tensors of a stack; any other tensor as it is.

    Shapes: `gate_up_proj` [experts, 2 F, H], `down_proj` [experts, H, F].
    """
    prefix, found, part = name.rpartition(".mlp.experts.")
    if not found or part not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for piece, weight in zip(names, expert.chunk(len(names)), strict=True):
            yield f"{prefix}{found}{number}.{piece}.weight", weight.clone()


if __name__ == "__main__":
    main()

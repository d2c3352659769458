"""Write the weights as a Hugging Face directory: safetensors, config, and the files that came with
the source.

Not here: the tensors by name (`stages`), sending them to engines (`rlpipe.sync`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlpipe.engines.megatron.bridges.kept import with_kept
from rlpipe.engines.megatron.bridges.stages import whole_weights
from rlpipe.engines.megatron.model.build import Scorer

MAX_FILE_BYTES = 5 * 1024**3


def save_hf(trained: Scorer, source: str | Path, directory: str | Path) -> None:
    """Write the directory from rank 0; the tokenizer and other small files are copied from
    `source`. Collective."""
    weights = whole_weights(trained.bridge, trained.ddp)
    if torch.distributed.get_rank() != 0:
        for _ in weights:
            pass
    else:
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        for file in Path(source).iterdir():
            if file.is_file() and not file.name.endswith(
                (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".gguf")
            ):
                shutil.copyfile(file, target / file.name)
        _unquantised(target / "config.json")
        _write(with_kept(weights, source, trained.bridge.hf_config), target)
    torch.distributed.barrier()


def _unquantised(config: Path) -> None:
    """The weights are written whole, whatever they were in the source."""
    values = json.loads(config.read_text(encoding="utf-8"))
    if values.pop("quantization_config", None) is not None:
        config.write_text(json.dumps(values, indent=2), encoding="utf-8")


def _write(weights: Iterator[tuple[str, torch.Tensor]], target: Path) -> None:
    parts: list[list[str]] = []
    total = 0
    for number, tensors in enumerate(_files(weights)):
        save_file(tensors, target / f"part-{number}", metadata={"format": "pt"})
        parts.append(list(tensors))
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    if len(parts) == 1:
        (target / "part-0").rename(target / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for number, name in enumerate(names):
        (target / f"part-{number}").rename(target / name)
    index = {weight: name for name, part in zip(names, parts, strict=True) for weight in part}
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (target / "model.safetensors.index.json").write_text(
        json.dumps(content, indent=2, sort_keys=True)
    )


def _files(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors on CPU, in dictionaries of at most MAX_FILE_BYTES (or one tensor)."""
    tensors: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        extra = tensor.numel() * tensor.element_size()
        if tensors and size + extra > MAX_FILE_BYTES:
            yield tensors
            tensors = {}
            size = 0
        tensors[name] = tensor.cpu().contiguous().clone()
        size += extra
    yield tensors
